"""The WAN laboratory: Atoll's strategies beside plain DDP and its hooks, over links as thin as you ask for.

    sudo env PATH=$PATH python benchmarks/wan.py --model mlp --rates 100,500,1000,trace,none \\
        --methods local,ddp,ddp-fp16,ddp-powersgd,stale-sparse:sparsity=0.95 --steps 300 --target 0.30 --plot wan.png
    sudo env PATH=$PATH python benchmarks/wan.py --set tta --json tta.json

Needs root. Every worker is a process of one thread in a network namespace of its own. Namespaces are joined by veth
pairs to one more, with token buckets (tbf) at both ends of each pair, or along a trace (traces/wan.csv: 50-600 Mbit/s,
mean 152). --rtt-ms adds latency in a relay. Before each set of cells one TCP stream shows what the links really carry.
Namespaces are removed at the end, and those of a laboratory that was killed by the next one.

Methods: `local` (the same processes, each training alone on its share: the floor), `ddp`, `ddp-fp16`
(fp16_compress_hook), `ddp-powersgd[:rank=R]` (one bucket: it hangs with several over gloo), Atoll's `dense`,
`zen[:scheme=S]` and
`stale-sparse[:sparsity=R,staleness=S,values=V,selection=S,error_feedback=false,momentum=M,digest_every=N]`.
All have the same initial weights, batch, learning rate and order of samples. Cells are measured in turn: all methods at
a rate, then the next rate; --repeats goes through everything again.

A cell ends after --steps, or after --max-s. Figures with `~` are extrapolated from a cell that was ended: the
iterations to the target, or the final loss, are then those of an unshaped run of the same method (made at the end where
it is missing), and each iteration that was not run counts as the cell's median step. Losses are training losses, means
of all workers and 10 iterations. The first 3 steps are in every time to a loss, and in no median step. Bytes are those
on the sender's veth. `memory`: peak resident memory in training, beyond what there was with data, model and optimizer
(state included) built, in multiples of the parameters' bytes; gradients count. `stall`: share of the time that forward
passes waited.

Sets, the tables of docs/performance.md (--model, --workers, --rates, --methods, --steps, --max-s replace a set's own):
    --set tta         time to a loss, three models, 2 and 4 workers, 100, 500, 1000 Mbit/s and the trace (hours)
    --set floor       a step against no network at all
    --set staleness   a step late against in step
    --set feedback    with and without error feedback
    --set momentum    moments of untouched blocks decayed when touched, or left alone as in the paper
    --set sparse      gradients that are sparse by nature, by each scheme of `zen` and by gloo's all-gather
    --set memory      peak memory of every method
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lab import cell, plot, tables, trace
from lab.cell import Work
from lab.machine import processor
from lab.network import Network, refuse_without_tools
from lab.options import MODELS, SPARSE_MODELS, Rate, split_methods
from lab.probe import probe
from lab.results import Result, result
from lab.sets import SETS, TARGETS, Experiment
from rich.console import Console

from atoll.errors import AtollError, BadInput

UNSHAPED_S = 1800.0  # what an unshaped run that others are extrapolated from may take


def main() -> int:
    options = arguments().parse_args()
    try:
        experiment, target = wanted(options)
        refuse_without_tools()
        if options.plot:
            plot.refuse_without_matplotlib()
        Laboratory(options, experiment, target).run()
    except AtollError as error:
        print(f"wan: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Methods of data parallelism over thin links, side by side. Needs root."
    )
    parser.add_argument("--set", choices=SETS, help="one of the tables of docs/performance.md")
    parser.add_argument("--model", help=f"{', '.join((*MODELS, *SPARSE_MODELS))}, separated by commas")
    parser.add_argument("--workers", help="numbers of workers, separated by commas")
    parser.add_argument("--rates", help="Mbit/s, `trace` or `none`, separated by commas")
    parser.add_argument("--methods", help="separated by commas, with options as NAME:OPTION=VALUE,OPTION=VALUE")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--max-s", type=float, help="seconds that a cell trains at most")
    parser.add_argument("--target", type=float, help="training loss to reach")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round trip that a relay adds (0: none)")
    parser.add_argument("--trace", type=Path, default=trace.WAN, help="CSV of seconds,mbit_s for the rate `trace`")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0, help="samples of a worker in a step (0: the model's own)")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: to try the laboratory out")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--plot", type=Path, help="draw loss against time here (.png, .svg)")
    return parser


def wanted(options: argparse.Namespace) -> tuple[Experiment, float | None]:
    """The set with what the command line puts in place of its parts, and a target for all models. Raises BadInput."""
    chosen = SETS[options.set] if options.set else Experiment()
    given = {
        "models": tuple(options.model.split(",")) if options.model else None,
        "workers": tuple(map(whole, options.workers.split(","))) if options.workers else None,
        "rates": options.rates,
        "methods": options.methods,
        "steps": options.steps,
        "max_s": options.max_s,
    }
    chosen = replace(chosen, **{name: value for name, value in given.items() if value is not None})
    known = (*MODELS, *SPARSE_MODELS)
    unknown = [model for model in chosen.models if model not in known]
    if unknown:
        raise BadInput(f"there is no model {unknown[0]!r}; choose among {', '.join(known)}")
    if any(not 1 <= workers <= 16 for workers in chosen.workers):
        raise BadInput(f"--workers {options.workers}: each must be 1 to 16")
    if chosen.steps < 2 or not chosen.max_s > 0 or options.repeats < 1 or options.batch < 0:
        raise BadInput("--steps must be at least 2, --max-s above 0, --repeats at least 1, --batch at least 0")
    if not 0 <= options.rtt_ms <= 2000:
        raise BadInput(f"--rtt-ms {options.rtt_ms:g} must be 0 to 2000")
    return chosen, options.target


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise BadInput(f"{text!r} is not a whole number")
    return int(text)


@dataclass
class Laboratory:
    """Runs the cells of an experiment and shows them."""

    options: argparse.Namespace
    experiment: Experiment
    target: float | None

    def __post_init__(self) -> None:
        self.methods = split_methods(self.experiment.methods)
        self.rates = [Rate.parse(text) for text in self.experiment.rates.split(",")]
        self.trace = trace.read(self.options.trace)
        self.console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        self.results: list[Result] = []
        self.cells = 0
        self.about = {
            "date": str(datetime.date.today()),
            "command": shlex.join(["python", *sys.argv]),
            "machine": f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}",
        }

    def run(self) -> None:
        self.console.print(f"{self.about['date']}  {self.about['machine']}\n{self.about['command']}")
        with terminated_like_interrupted():
            for model in self.experiment.models:
                for workers in self.experiment.workers:
                    with Network(workers, self.options.rtt_ms) as network:
                        self._measure(network, model)
                    self._show(model, workers)

    def _measure(self, network: Network, model: str) -> None:
        for repeat in range(self.options.repeats):
            for rate in self.rates:
                if network.workers > 1:
                    self.console.print(probe(network, rate, self.trace))
                for method in self.methods:
                    work = Work(
                        model=model, method=method, workers=network.workers, rate=rate, rtt_ms=self.options.rtt_ms,
                        steps=self.experiment.steps, max_s=self.experiment.max_s, batch=self.options.batch,
                        tiny=self.options.size == "tiny",
                    )  # fmt: skip
                    self._cell(network, work, repeat)
        if self._target(model) is not None:
            here = [one for one in self.results if (one.model, one.workers) == (model, network.workers)]
            methods = {method.text: method for method in self.methods}
            for wanting in tables.wants_unshaped(here):
                work = Work(
                    model=model, method=methods[wanting.method], workers=network.workers, rate=Rate.parse("none"),
                    rtt_ms=self.options.rtt_ms, steps=self.experiment.steps, max_s=UNSHAPED_S,
                    batch=self.options.batch, tiny=self.options.size == "tiny",
                )  # fmt: skip
                self._cell(network, work, repeat=0)

    def _cell(self, network: Network, work: Work, repeat: int) -> None:
        self.cells += 1
        measured = result(cell.run(network, work, self.trace, self.cells), repeat)
        self.results.append(measured)
        step = f"{measured.step_median_s:.3f} s/step" if measured.step_s else "no step timed"
        loss = f", loss {measured.smooth()[-1].loss:.3f}" if measured.smooth() else ""
        ended = f" ({measured.ended})" if measured.ended else ""
        where = f"{work.model} {work.workers}× {work.rate}, {work.method.text}"
        self.console.print(f"  {where}: {len(measured.points)} steps, {step}{loss}{ended}", markup=False)
        if self.options.json:
            written = {**self.about, "results": [one.to_json() for one in self.results]}
            self.options.json.write_text(json.dumps(written) + "\n")

    def _target(self, model: str) -> float | None:
        return TARGETS[model] if self.target is None and self.experiment.to_target else self.target

    def _show(self, model: str, workers: int) -> None:
        here = [one for one in self.results if (one.model, one.workers) == (model, workers)]
        for table in tables.tables(here, self._target(model)):
            self.console.print(table)
        if self.options.plot:
            plot.draw(self.results, {name: self._target(name) for name in (*MODELS, *SPARSE_MODELS)}, self.options.plot)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that the namespaces are removed."""

    def unwind(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
