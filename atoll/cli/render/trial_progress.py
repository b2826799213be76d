"""Progress of `atoll profile`: a line for each trial, and a bar where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.cli.render import terminal

if TYPE_CHECKING:
    from rich.progress import Progress

    from atoll.profiling.document import BaselineTrial, Document, ProbeTrial
    from atoll.profiling.trials import Trial


@contextmanager
def shown(document: Document) -> Iterator[TrialProgress]:
    """Show the progress while the profile is made."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bars:
        yield TrialProgress(bars, document)


class TrialProgress:
    """Bars of all probes and of the current trial's steps, below the trials that have ended."""

    def __init__(self, bars: Progress, document: Document) -> None:
        self._bars = bars
        self._all = bars.add_task("probes", total=document.wanted_probes, completed=len(document.probes))
        self._steps = bars.add_task("starting", total=None)

    def stepped(self, trial: Trial, steps: int) -> None:
        """Show the finished steps of a trial."""
        if steps == 0:
            self._bars.reset(self._steps, total=trial.all_steps, description=str(trial))
        self._bars.update(self._steps, completed=steps)

    def ended(self, document: Document, made: BaselineTrial | ProbeTrial) -> None:
        """Print the document's newest trial."""
        terminal.note(in_words(document, made))
        self._bars.update(self._all, completed=len(document.probes))


def in_words(document: Document, made: BaselineTrial | ProbeTrial) -> str:
    """Return the line of one trial. made: the document's newest."""
    from atoll.profiling.document import BaselineTrial
    from atoll.profiling.profiler import tried

    took = terminal.duration(made.seconds)
    if isinstance(made, BaselineTrial):
        return f"baseline     batch {made.batch:5d}  loss {made.loss:.4g}  ({took})"
    number = f"{len(document.probes)}/{document.wanted_probes}"
    percent = 100 * (tried(document)[-1].ratio - 1)
    result = "diverged" if made.loss is None else f"loss {made.loss:.4g}, {percent:+.1f} %"
    return f"probe {number:>6} batch {made.batch:5d}  sparsity {made.sparsity:.4f}  {result}  ({took})"
