"""What all ranks know alike after a step: the newest plan that everyone has, and whether anyone was asked to stop.

One MIN all-reduce of eight integers, on a group of its own so that it overlaps the backward pass and never waits
behind gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from atoll.agent.runtime.transport.process_groups import Group, collective
from atoll.errors import BadInput

MAX_SAMPLES: Final = 2**40  # of an epoch, so that its number and a place in it fit one integer


@dataclass(frozen=True, slots=True)
class MemoryProgress:
    """Of checkpoints in memory. One rank's word, or what holds for all."""

    step: int = 0  # newest that is written; of all ranks the least
    every: int = 1  # steps from one to the next; of all ranks the most


@dataclass(frozen=True, slots=True)
class Agreed:
    """The outcome of one round, equal on all ranks."""

    plan_id: int  # every rank has the plans 1..plan_id
    stop: bool  # at least one rank was asked to stop
    memory: MemoryProgress = field(default_factory=MemoryProgress)


class Control:
    """Rounds of agreement, one for each backward pass."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._said = torch.zeros(8, dtype=torch.int64)
        self._work: dist.Work | None = None

    def begin(self, step: int, own: Agreed, *, epoch: int = 0, start: int = 0) -> None:
        """Say what this rank knows in `step`, whose batch begins at `start` of the epoch's order. Raises PeerLost."""
        place = epoch * MAX_SAMPLES + start
        self._said = torch.tensor(
            [own.plan_id, -int(own.stop), step, -step, place, -place, own.memory.step, -own.memory.every],
            dtype=torch.int64,
        )
        with collective("agreeing on the plan"):
            self._work = dist.all_reduce(self._said, op=dist.ReduceOp.MIN, group=self._group.control, async_op=True)

    def finish(self) -> Agreed:
        """Wait for what the others said. Raises PeerLost, and BadInput where ranks are in different steps."""
        assert self._work is not None  # begin came first
        with collective("agreeing on the plan"):
            self._work.wait()
        said = [int(value) for value in self._said.tolist()]
        plan_id, stop, first_step, last_step, first_place, last_place, memory_step, every = said
        if first_step != -last_step:
            raise BadInput(
                f"ranks are out of step: one is in step {first_step}, another in step {-last_step}. Every rank must "
                "call run.backward equally often for each batch; do not skip batches on some ranks only"
            )
        if first_place != -last_place:
            epoch, start = divmod(first_place, MAX_SAMPLES)
            other_epoch, other_start = divmod(-last_place, MAX_SAMPLES)
            raise BadInput(
                f"ranks train different batches in step {first_step}: one is at sample {start} of epoch {epoch}, "
                f"another at {other_start} of {other_epoch}. Every rank must leave the loop over the loader at the "
                "same batch: decide a break on what all ranks know alike, not on a local loss"
            )
        return Agreed(plan_id, stop != 0, MemoryProgress(memory_step, -every))
