"""How long a step takes under each strategy, given what each rank computes.

Legend of suffixes: N = ranks, J = islands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.controller.planners.optperf import Overlap
from atoll.controller.planners.water_filling import F64
from atoll.controller.planners.wire_bytes import Traffic
from atoll.controller.simulator.devices import Computing
from atoll.controller.simulator.links import Link

GRADIENT_BYTES: Final = 4
"""Of an entry in a dense all-reduce: float32."""
VALUE_BYTES: Final = 2
"""Of an entry of a sparse update: float16."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One step. ends_s: when its slowest rank is done. step_N: from boundary to boundary. sync_N, last_sync_N: of the
    all-reduces as each rank sees them. sent_J, busy_J: bytes that left each island, and seconds they took to leave."""

    ends_s: float
    step_N: F64
    first_bucket_N: F64
    sync_N: F64
    last_sync_N: F64
    stall_N: F64
    sent_J: F64
    busy_J: F64


def dense_step(computing: Computing, overlap: Overlap, begins_s: float, islands: int) -> Timed:
    """Cannikin (2024), Eq. 7: every rank waits for the last bucket, which waits for all backward passes and for the
    buckets before it, which wait for everybody's first."""
    first_N = computing.before_N + overlap.gamma * computing.backward_N
    others_done = first_N.max() + overlap.t_o
    last_begins_N = np.maximum(computing.all_N, others_done)
    step_s = float(last_begins_N.max()) + overlap.t_u
    none_J = np.zeros(islands)
    return Timed(
        ends_s=begins_s + step_s,
        step_N=np.full(len(first_N), step_s),
        first_bucket_N=overlap.gamma * computing.backward_N,
        sync_N=others_done - first_N,
        last_sync_N=step_s - last_begins_N,
        stall_N=np.zeros(len(first_N)),
        sent_J=none_J,
        busy_J=none_J,
    )


def ring_overlap(entries: int, bucket_bytes: float, ranks: int, mbit_s: float) -> tuple[float, float]:
    """Seconds of a ring all-reduce of float32 gradients over links of this rate, and the last bucket's share of it."""
    size = entries * GRADIENT_BYTES
    return 2 * (ranks - 1) / ranks * size / (mbit_s * 125_000), min(1.0, bucket_bytes / size)


class SparseRounds:
    """Steps with staleness 1: step n begins on a rank once its own step n - 1 and everybody's round n - 2 are done.

    A round's bytes leave an island when its ranks have computed and the round before has left."""

    def __init__(self, island_N: NDArray[np.int64], links: Sequence[str], begins_s: float) -> None:
        self._island_N, self._links = island_N, tuple(links)
        ranks_J = np.bincount(island_N, minlength=len(links)).astype(np.float64)
        self._part_J = ranks_J / ranks_J.sum()
        self._own_done_N = np.full(len(island_N), begins_s)
        self._rounds_done = deque([begins_s, begins_s], maxlen=2)
        self._link_free_J = np.full(len(links), begins_s)

    def step(self, computing: Computing, links: Mapping[str, Link], entries: int, rate: float) -> Timed:
        starts_N = np.maximum(self._own_done_N, self._rounds_done[0])
        done_N = starts_N + computing.all_N
        traffic = Traffic(entries, VALUE_BYTES, self._part_J, np.ones(len(self._links)))
        sent_J, received_J = traffic.carried(1 - rate)
        begin_J = np.array([done_N[self._island_N == j].max() for j in range(len(self._links))])
        begin_J = np.maximum(begin_J, self._link_free_J)
        left_J, through_J = begin_J.copy(), begin_J.copy()
        for j, name in enumerate(self._links):
            if sent_J[j] > 0:
                left_J[j] = links[name].ends_s(float(begin_J[j]), float(sent_J[j]))
                through_J[j] = max(left_J[j], links[name].ends_s(float(begin_J[j]), float(received_J[j])))
        self._link_free_J = through_J
        self._rounds_done.append(float(through_J.max()))
        before_N, self._own_done_N = self._own_done_N, done_N
        return Timed(
            ends_s=float(done_N.max()),
            step_N=done_N - before_N,
            first_bucket_N=np.zeros(len(done_N)),
            sync_N=np.zeros(len(done_N)),
            last_sync_N=np.zeros(len(done_N)),
            stall_N=starts_N - before_N,
            sent_J=sent_J,
            busy_J=left_J - begin_J,
        )
