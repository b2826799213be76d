"""The progress of `atoll profile`: a bar where somebody watches, a line for each trial where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.cli.render import terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from atoll.profiling.document import BaselineTrial, Document, ProbeTrial
    from atoll.profiling.profiler import Watcher
    from atoll.profiling.trials import Trial


@contextmanager
def shown(document: Document) -> Iterator[Watcher]:
    """While the profile is made."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
    with bar:
        yield BarProgress(bar, document)


class PlainProgress:
    """What is printed of each trial when it has ended."""

    def began(self, document: Document, trial: Trial) -> None: ...

    def stepped(self, steps: int) -> None: ...

    def ended(self, document: Document, made: BaselineTrial | ProbeTrial) -> None:
        terminal.note(in_words(document, made))


class BarProgress(PlainProgress):
    """All probes, and the steps of the trial under way; ended ones scroll by above."""

    def __init__(self, bars: Progress, document: Document) -> None:
        self._bars = bars
        self._all: TaskID = bars.add_task("probes", total=document.wanted_probes, completed=len(document.probes))
        self._steps: TaskID = bars.add_task("starting", total=None)

    def began(self, document: Document, trial: Trial) -> None:
        self._bars.reset(self._steps, total=trial.all_steps, description=str(trial))

    def stepped(self, steps: int) -> None:
        self._bars.update(self._steps, completed=steps)

    def ended(self, document: Document, made: BaselineTrial | ProbeTrial) -> None:
        self._bars.console.print(in_words(document, made))
        self._bars.update(self._all, completed=len(document.probes))


def in_words(document: Document, made: BaselineTrial | ProbeTrial) -> str:
    """One trial on a line. made: the document's newest."""
    from atoll.profiling.document import BaselineTrial
    from atoll.profiling.profiler import tried

    took = terminal.duration(made.seconds)
    if isinstance(made, BaselineTrial):
        return f"baseline     batch {made.batch:5d}  loss {made.loss:.4g}  ({took})"
    number = f"{len(document.probes)}/{document.wanted_probes}"
    ratio = tried(document)[-1].ratio
    what = "diverged" if made.loss is None else f"loss {made.loss:.4g}, {100 * (ratio - 1):+.1f} %"
    return f"probe {number:>6} batch {made.batch:5d}  sparsity {made.sparsity:.4f}  {what}  ({took})"
