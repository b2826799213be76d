"""Agreement without a round trip: proposed in one pass, acted on some passes later, by all ranks alike.

Every rank says at the beginning of a pass what it knows. After pass n and before the next one begins, everyone acts on
what all said in pass n - staleness: that has arrived, for the weights of that pass are needed too."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.agreement import Agreed, MemoryProgress
from atoll.errors import BadInput, PeerLost

_SAID: Final = struct.Struct("<QQQQQBQQ")  # plan, step, epoch, start, total, stop; of memory: step and period
KEPT_PASSES: Final = 8

Said = tuple[int, int, int, int, int, int, int, int]


class Agreement:
    """`heard` by the transport's thread, the rest by the training thread."""

    def __init__(self, rank: int, world_size: int, tell: Callable[[int, bytes], None]) -> None:
        """tell: hand (pass, payload) to all other ranks."""
        self._rank, self._world_size, self._tell = rank, world_size, tell
        self._heard: dict[int, dict[int, Said]] = {}
        self._done = 0  # passes up to this one were acted on
        self._broken: str | None = None
        self._changed = threading.Condition()

    def propose(self, number: int, batch: BatchSlice, own: Agreed) -> None:
        """At the beginning of pass `number`. own: what this rank knows."""
        memory = own.memory
        said = (
            own.plan_id,
            batch.step,
            batch.epoch,
            batch.start,
            batch.total,
            int(own.stop),
            memory.step,
            memory.every,
        )
        with self._changed:
            self._heard.setdefault(number, {})[self._rank] = said
        if self._world_size > 1:
            self._tell(number, _SAID.pack(*said))

    def heard(self, number: int, rank: int, payload: bytes | memoryview) -> str | None:
        """A peer's word. Returns why it was refused, None if it was taken."""
        if len(payload) != _SAID.size or not 0 <= rank < self._world_size or rank == self._rank:
            return "malformed"
        with self._changed:
            if number <= self._done:
                return "old step"
            if number > self._done + KEPT_PASSES:
                return "step too far ahead"
            if rank in self._heard.setdefault(number, {}):
                return "twice"
            self._heard[number][rank] = _SAID.unpack(payload)
            self._changed.notify_all()
        return None

    def fail(self, reason: str) -> None:
        """Wakes the waiter, which raises PeerLost."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def act_on(self, number: int, deadline_s: float) -> tuple[Agreed, float]:
        """What all ranks said in pass `number`, and the seconds it was waited for.

        Raises PeerLost where one does not answer in time, BadInput where ranks train different batches."""
        begun_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._complete(number), deadline_s)
            if not self._complete(number):
                silent = [rank for rank in range(self._world_size) if rank not in self._heard.get(number, {})]
                reason = self._broken or f"rank {silent[0]} said nothing of pass {number} for {deadline_s:.0f} s"
                raise PeerLost(reason)
            said = [self._heard[number][rank] for rank in range(self._world_size)]
            self._done = number
            for old in [one for one in self._heard if one <= number]:
                del self._heard[old]
        waited_s = time.monotonic() - begun_s
        for rank, one in enumerate(said):
            if one[1:5] != said[0][1:5]:
                (step, epoch, start), (first_step, first_epoch, first_start) = one[1:4], said[0][1:4]
                raise BadInput(
                    f"ranks train different batches in their pass {number}: rank 0 step {first_step} at sample "
                    f"{first_start} of epoch {first_epoch}, rank {rank} step {step} at {start} of {epoch}. Every rank "
                    "must call run.backward equally often for each batch and leave the loop over the loader at the same"
                )
        memory = MemoryProgress(min(one[6] for one in said), max(one[7] for one in said))
        return Agreed(min(one[0] for one in said), any(one[5] for one in said), memory), waited_s

    def _complete(self, number: int) -> bool:
        return len(self._heard.get(number, {})) == self._world_size
