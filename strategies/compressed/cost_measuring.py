"""Measure the costs that a plan rests on.

Compression is measured when a worker starts, links when a run starts and every hundred passes, tensors by their hooks.
Link costs carry over from view to view; only the links of new workers are measured then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from atoll.agent.runtime.strategy_interface.capabilities import WorkerContext
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.compressed.algorithms import compressor_of, momentum_of
from atoll.strategies.compressed.codes.compressors import CodePlace, Compressor
from atoll.strategies.compressed.codes.dense_codes import Float16
from atoll.strategies.compressed.codes.sparse_codes import compress_with_momentum
from atoll.strategies.compressed.costs.link_costs import AgreedCosts, Cost, LearnedCosts, LinkCosts, least_cost
from atoll.strategies.compressed.costs.measured import (
    LINK_EVERY_ROUNDS,
    MAX_ROWS,
    PROBE_BYTES,
    REPEATS,
    TELL_EVERY_ROUNDS,
    MeasuredCosts,
)
from atoll.strategies.compressed.costs.timing import PassTimes
from atoll.strategies.compressed.exchanges.group_sum import ExchangedGroup, GroupGradient, RankCircle
from atoll.strategies.compressed.groups.layout import GRADIENT_BYTES, TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup, Way
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.dense.worker import DenseReducer
from atoll.strategies.staged_sums.exchange import StagedExchange

CPU: Final = torch.device("cpu")
SMALL_ENTRIES: Final = 1_024
LARGE_ENTRIES: Final = 1 << 18
"""Entries that calibration compresses: a line through both sizes is the cost."""
ONE_PERCENT_DEVIATIONS: Final = 2.576
"""Standard deviations beyond which one percent of a normal distribution lies: the scale of calibration's entries
against the threshold of `threshold`."""


class Measuring:
    """Measurements of one worker. All methods run on the training thread; `start` and `between_passes` are
    collective."""

    def __init__(
        self,
        context: WorkerContext,
        layout: TensorLayout,
        compressor: Compressor,
        device: torch.device,
        times: PassTimes,
    ) -> None:
        """Continue with the costs of the previous view."""
        self._session, self._scheduler = context.session, context.scheduler
        assert isinstance(context.settings, Compressed)
        self._settings, self._layout, self._compressor = context.settings, layout, compressor
        self._device, self._times = device, times
        self.learned = context.learned if isinstance(context.learned, LearnedCosts) else LearnedCosts()

    def start(self, exchange: StagedExchange, circle: RankCircle, next_round: Callable[[], None]) -> None:
        """Measure what is not known yet. next_round: begins another round of exchanges, on all ranks."""
        self._exchange, self._circle, self._next_round = exchange, circle, next_round
        if self._session.group is None:
            return
        if not self.learned.compression:
            taken = {device: self._calibrate(device) for device in {self._device, CPU}}
            for name, device in (("device", self._device), ("cpu", CPU)):
                compress, decompress = taken[device]
                self.learned.compression |= {f"compress_{name}": compress, f"decompress_{name}": decompress}
        told = self._session.group.gather_bytes(self.learned.packed())
        agreed = AgreedCosts.of(told, circle.ranks)
        if agreed is None:
            self.measure_links()
        else:
            self._know_links(self._session.group, agreed)

    def between_passes(self) -> None:
        self.learned.rounds += 1
        if self.learned.rounds >= LINK_EVERY_ROUNDS:
            self.measure_links()
            self._times.forget()

    def regrouped(self) -> None:
        self._times.forget()

    def tell(self, groups: Sequence[TensorGroup]) -> None:
        """Send the costs at a pass's end, every TELL_EVERY_ROUNDS passes."""
        backward_s = self._times.backward_s
        links = self.learned.links
        if self.learned.rounds % TELL_EVERY_ROUNDS or backward_s is None or links is None:
            return
        layout = self._layout
        place = CodePlace(0, 0, layout.shapes, self._settings.density)
        self._scheduler.tell(
            MeasuredCosts(
                tensors=rows_of(layout, backward_s),
                rest_s=self._times.rest_s,
                iteration_s=self._times.iteration_s,
                groups=len(groups),
                workers=len(self._circle.ranks),
                algorithm=self._settings.algorithm,
                divisible=self._compressor.divisible,
                ratio=self._compressor.ratio(place, layout.entries),
                link=links.link,
                allreduce=links.allreduce,
                **self.learned.compression,
            )
        )

    # --- compression

    def _calibrate(self, device: torch.device) -> tuple[Cost, Cost]:
        """Measure compression and decompression on a device; for a model on a GPU with the copies between them."""
        compressor = compressor_of(self._settings, self._session.seed)
        few, many = (self._timed(compressor, entries, device) for entries in (SMALL_ENTRIES, LARGE_ENTRIES))
        costs = [line(SMALL_ENTRIES, one_s, LARGE_ENTRIES, other_s) for one_s, other_s in zip(few, many, strict=True)]
        return costs[0], costs[1]

    def _timed(self, compressor: Compressor, entries: int, device: torch.device) -> tuple[float, float]:
        """Return the seconds to compress and to decompress so many entries."""
        generator = torch.Generator().manual_seed(1)
        deviation = (
            self._settings.threshold / ONE_PERCENT_DEVIATIONS if self._settings.algorithm == "threshold" else 1e-3
        )
        given = torch.randn(entries, generator=generator).mul_(deviation).to(self._device)
        side = round(entries**0.5)
        place = CodePlace(0, 0, ((side, side),), self._settings.density)
        velocity, momentum = torch.zeros(entries, device=device), momentum_of(self._settings)
        compressing_s, adding_s = [], []
        for _ in range(REPEATS):
            begun_s = self._now_s()
            value, residual = given.to(device), torch.zeros_like(given).to(device)
            if momentum:
                payload = compress_with_momentum(compressor, value, velocity, residual, place, momentum=momentum)
            else:
                payload = compressor.compress(value, residual, place)
            residual.to(self._device)
            compressed_s = self._now_s()
            out = torch.zeros(entries, device=device)
            compressor.decompress(payload.data, out, place)
            out.to(self._device)
            compressing_s.append(compressed_s - begun_s)
            adding_s.append(self._now_s() - compressed_s)
        return min(compressing_s), min(adding_s)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    # --- links

    def measure_links(self) -> None:
        """Measure all links. Collective."""
        ranks = self._session.place.world_size
        link = self._link_cost(self._circle)
        entries = max(PROBE_BYTES * ranks // (2 * (ranks - 1) * GRADIENT_BYTES), 2)
        small_s, large_s = self._allreduced_s(1), self._allreduced_s(entries)
        allreduce = [small_s, max(large_s - small_s, 0.0) / (entries * GRADIENT_BYTES)]
        self._keep(LinkCosts(link, allreduce, ranks), 0)

    def _know_links(self, group: Group, agreed: AgreedCosts) -> None:
        """Adopt the agreed costs; new ranks exchange with one other rank. Collective."""
        links, rank = agreed.links, self._circle.rank
        if agreed.new:
            few = tuple(sorted((agreed.known, *agreed.new)))
            mine = self._link_cost(RankCircle(few, rank, rank, ())) if rank in few else self._pass_over()
            told = [np.frombuffer(one, np.float64).tolist() for one in group.gather_bytes(np.array(mine).tobytes())]
            links = links.slowed_to(least_cost([one for one in told if one]))
        self._keep(links, agreed.rounds)

    def _keep(self, links: LinkCosts, rounds: int) -> None:
        self.learned.links, self.learned.rounds = links, rounds
        self.learned.took_part = self._circle.rank in self._circle.ranks

    def _link_cost(self, circle: RankCircle) -> Cost:
        """Measure an exchange among these ranks. Collective, for all ranks."""
        others = len(circle.ranks) - 1
        entries = max(min(PROBE_BYTES // max(2 * others, 1), self._layout.entries), 2)
        small_s, large_s = self._exchanged_s(circle, 1), self._exchanged_s(circle, entries)
        return [small_s, max(large_s - small_s, 0.0) / max(others * entries * 2, 1)]

    def _pass_over(self) -> Cost:
        """Take part in the rounds of others' `_link_cost` without exchanging."""
        for _ in range(2 * REPEATS):
            self._next_round()
        return []

    def _exchanged_s(self, circle: RankCircle, entries: int) -> float:
        """Return the seconds in which these ranks exchange so many half-precision entries; the least of a few times, as
        a rank may begin late."""
        found = []
        for _ in range(REPEATS):
            self._next_round()
            value = torch.ones(entries)
            mine = GroupGradient(CodePlace(0, 0), value, torch.zeros(entries), np.zeros(0, np.float32), value)
            way = Way(compressed=True, compress="cpu")
            begun_s = time.monotonic()
            group = ExchangedGroup(self._exchange, 0, circle, Float16(), mine, way=way, ended=lambda _: None)
            group.finish(self._session.collective_timeout_s)
            found.append(time.monotonic() - begun_s)
        return min(found)

    def _allreduced_s(self, entries: int) -> float:
        reducer, found = DenseReducer(self._session.group), []
        ones = torch.ones(entries, device=self._device)
        for _ in range(REPEATS):
            begun_s = self._now_s()
            reducer.reduce(ones, (), lambda _: None).wait()
            found.append(self._now_s() - begun_s)
        return min(found)


def line(small: int, small_s: float, large: int, large_s: float) -> Cost:
    """Return [alpha, beta]: entries of GRADIENT_BYTES each take alpha + beta * bytes seconds."""
    beta = max(large_s - small_s, 0.0) / ((large - small) * GRADIENT_BYTES)
    return [max(small_s - beta * small * GRADIENT_BYTES, 0.0), beta]


def rows_of(layout: TensorLayout, backward_s: Sequence[float]) -> list[list[int]]:
    """Return `MeasuredCosts.tensors`: with more tensors than rows, neighbours share a row, in equal numbers."""
    count = len(layout.names)
    step = -(-count // MAX_ROWS)
    return [
        [
            min(begin + step, count) - begin,
            layout.size(begin, min(begin + step, count)) * GRADIENT_BYTES,
            round(1e6 * sum(backward_s[begin : begin + step])),
        ]
        for begin in range(0, count, step)
    ]
