"""Sums of a sparse tensor by the schemes of strategy `zen`, over thin links: seconds and bytes, beside the formulas.

    sudo env PATH=$PATH python benchmarks/zen.py [--workers 2,4] [--mbit-s 100] [--densities 0.001,0.01,0.05,0.2]
                                                 [--no-words] [--longest-s 8] [--json zen.json]

Needs root. Workers are processes in network namespaces of their own (benchmarks/lab), with the strategy's transport and
messages between them; rounds follow each other at once, and count from the first one's start to the last worker's end.
Data: `words`, the gradients of workers' first batches of a model of benchmarks/wan.py, 500,000 rows of 48; synthetic
ones by their density, 65,536 rows of 16, of which the workers' overlap and lie mostly in the same eighth.

Cells: milliseconds of a sum (by the planner's formula, for the densities that the data have; the bytes that a worker
hands to its sockets, headers too, in per cent of the formula's). Bytes are the mean of the workers; of `sparse-ps` and
`omnireduce` the formula is the busiest worker's, and values that repeat are counted where whole gradients are sent
alone, so what `zen`, `sparse-ps` and later rounds of `sparcml` send of `words` is below it. Cells with ~ are the
formula's: they would take longer than --longest-s. A step of a whole model is in `benchmarks/wan.py --set sparse`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "scripts")]

import numpy as np
import torch
from lab.asked_workers import AskedWorkers
from lab.machine import processor
from lab.network import Network, refuse_without_tools
from numpy.typing import NDArray

from atoll.errors import AtollError
from atoll.planning.sparse_scheme import SCHEMES, Scheme, SparseSchemeInput, costs
from atoll.strategies.zen.blocks import BLOCK_ENTRIES, to_blocks
from atoll.strategies.zen.coordinates import Coordinates, UnitShape, distinct_values

WORKER: Final = Path(__file__).resolve().parent / "scripts" / "zen_sums.py"
SYNTHETIC: Final = UnitShape(65_536, 16)
ENOUGH_BYTES: Final = 4e6  # that rounds carry together, so that buckets of tokens are empty
MOST_ROUNDS: Final = 20
DEADLINE_S: Final = 180.0
Units = NDArray[np.uint32]


@dataclass(frozen=True)
class Data:
    name: str
    shape: UnitShape
    terms: list[Coordinates]  # by rank

    def save(self, folder: Path) -> None:
        arrays: dict[str, Any] = {"shape": np.array([self.shape.units, self.shape.width])}
        for rank, term in enumerate(self.terms):
            arrays |= {f"unit_{rank}": term.unit, f"values_{rank}": term.values}
        np.savez(folder / f"{self.name}.npz", **arrays)

    def planned(self, mbit_s: float) -> SparseSchemeInput:
        """What the planner would be asked if it knew all."""
        n, shape = len(self.terms), self.shape
        blocks = [to_blocks(term, shape).unit for term in self.terms]
        block_count = -(-shape.units * shape.width // BLOCK_ENTRIES)
        own = [term.unit for term in self.terms]
        return SparseSchemeInput(
            workers=n,
            entries=shape.units,
            densities=densities(own, shape.units),
            block_densities=densities(blocks, block_count),
            skew=skew(own, shape.units),
            value_bytes=4.0 * shape.width,
            index_bytes=4.0,
            bandwidth=mbit_s * 125_000,
            latency=0.0,
            distinct=distinct_values(self.terms[0]) / max(len(own[0]), 1),
        )


def densities(own: Sequence[Units], units: int) -> tuple[float, ...]:
    """Of one rank, the mean; then of the sums of the first two, three, ..."""
    so_far, found = own[0], [float(np.mean([len(one) for one in own])) / units]
    for one in own[1:]:
        so_far = np.union1d(so_far, one)
        found.append(len(so_far) / units)
    return tuple(found)


def skew(own: Sequence[Units], units: int) -> float:
    """Of what is pushed and pulled together: the densest of the equal ranges over the mean one."""
    n = len(own)
    edges = [units * place // n for place in range(n + 1)]
    pushed, pulled = (np.histogram(one, edges)[0] for one in (np.concatenate(own), np.unique(np.concatenate(own))))
    both = pushed / n + pulled
    return max(float(both.max() / both.mean()), 1.0)


def words(workers: int) -> Data:
    """The first batch of each worker."""
    from wan_models import TASKS  # here: its data need not be installed for the rest

    task = TASKS["table"]
    torch.manual_seed(1)
    model, dataset = task.build(False), task.dataset(False)
    table = next(model.parameters())
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))
    terms = []
    for rank in range(workers):
        inputs, targets = dataset[order[rank * task.batch : (rank + 1) * task.batch]]
        (sparse,) = torch.autograd.grad(task.loss(model(inputs), targets), [table])
        gradient = sparse.coalesce()
        terms.append(Coordinates(gradient.indices()[0].numpy().astype(np.uint32), gradient.values().numpy()))
    return Data("words", UnitShape.of(table), terms)


def synthetic(density: float, workers: int) -> Data:
    """Non-zeros cluster and overlap (Zen, 2023, characteristics C1 and C3)."""
    rng = np.random.default_rng(round(density * 1e6))
    weight = 1.0 / (1 + np.arange(SYNTHETIC.units)) ** 0.7
    count = max(1, round(density * SYNTHETIC.units))
    terms = []
    for _ in range(workers):
        unit = np.sort(rng.choice(SYNTHETIC.units, count, replace=False, p=weight / weight.sum()))
        terms.append(Coordinates(unit.astype(np.uint32), rng.standard_normal((count, SYNTHETIC.width), np.float32)))
    return Data(f"{density:g}", SYNTHETIC, terms)


class Workers(AskedWorkers):
    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(network, WORKER, DEADLINE_S)
        self._folder = folder

    def asked(self, rank: int) -> dict[str, Any]:
        own = {"rank": rank, "workers": self.network.workers, "host": self.network.address(rank)}
        return own | {"folder": str(self._folder)}

    def begun(self, said: list[Any]) -> None:
        self.ask(said)  # endpoints
        self.answers()

    def measure(self, data: str, scheme: Scheme, rounds: int) -> tuple[float, float]:
        """Seconds of a round, and bytes that a worker sends in it."""
        self.ask({"data": data, "scheme": scheme, "rounds": rounds})
        told = self.answers()
        seconds = max(one["took_s"] for one in told) / rounds
        return seconds, sum(one["sent_bytes"] for one in told) / len(told)


def measured(workers: Workers, data: Data, mbit_s: float, longest_s: float) -> dict[str, dict[str, float]]:
    """By scheme: formula_s, and seconds, sent_bytes and of_formula where it was run."""
    given = data.planned(mbit_s)
    found: dict[str, dict[str, float]] = {}
    for scheme, formula_s in costs(given).items():
        found[scheme] = {"formula_s": formula_s}
        if formula_s > longest_s:
            continue
        formula_bytes = formula_s * mbit_s * 125_000
        rounds = int(min(max(ENOUGH_BYTES / max(formula_bytes, 1), 2), MOST_ROUNDS))
        workers.measure(data.name, scheme, 1)  # members of partitions are listed once
        seconds, sent = workers.measure(data.name, scheme, rounds)
        found[scheme] |= {"seconds": seconds, "sent_bytes": sent, "of_formula": sent / formula_bytes}
    return found


def row(data: Data, found: Mapping[str, Mapping[str, float]]) -> str:
    cells = [f"{len(data.terms)}", data.name]
    for scheme in SCHEMES:
        one = found[scheme]
        if "seconds" not in one:
            cells.append(f"~{one['formula_s'] * 1e3:.0f}")
            continue
        cells.append(f"{one['seconds'] * 1e3:.1f} ({one['formula_s'] * 1e3:.1f}; {one['of_formula']:.0%})")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Sums of a sparse tensor by each scheme. Needs root.")
    parser.add_argument("--workers", default="2,4", help="numbers of workers, separated by commas")
    parser.add_argument("--densities", default="0.001,0.01,0.05,0.2", help="of the synthetic data; empty for none")
    parser.add_argument("--mbit-s", type=float, default=100.0)
    parser.add_argument("--no-words", action="store_true", help="synthetic data alone")
    parser.add_argument("--longest-s", type=float, default=8.0, help="sums for which the formula says more are not run")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    try:
        refuse_without_tools()
        results = []
        print(f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, {options.mbit_s:g} Mbit/s\n")
        print(f"| workers | data | {' | '.join(SCHEMES)} |\n|{'---|' * (len(SCHEMES) + 2)}")
        for count in map(int, options.workers.split(",")):
            densities_ = [float(one) for one in options.densities.split(",") if one]
            sets = [*([] if options.no_words else [words(count)]), *(synthetic(one, count) for one in densities_)]
            with tempfile.TemporaryDirectory() as folder, Network(count) as network:
                for data in sets:
                    data.save(Path(folder))
                network.shape(options.mbit_s)
                with Workers(network, Path(folder)) as workers:
                    for data in sets:
                        found = measured(workers, data, options.mbit_s, options.longest_s)
                        print(row(data, found), flush=True)
                        results.append({"workers": count, "data": data.name, "schemes": found})
        if options.json:
            options.json.write_text(json.dumps(results) + "\n")
    except AtollError as error:
        print(f"zen: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
