"""Tells the agent of each step once its times are known: on a CPU at once, on a GPU when that has come past it."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from atoll.agent.runtime.agent_link.outbox import Outbox
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.drivers.coordination import StepNumbers
from atoll.agent.runtime.step.measures.clock import Lap
from atoll.agent.runtime.step.measures.peak_memory import NOT_MEASURED, MemoryUse
from atoll.agent.runtime.strategy_interface.capabilities import Norms
from atoll.v1.common_pb2 import StepSample

LAG_STEPS: Final = 4
"""A host that is further ahead of its device waits for it: what waits here must not grow without end."""


class StepReporter:
    """Used by the training thread alone."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._waiting: deque[tuple[StepSample, Lap]] = deque()

    def report(
        self,
        batch_slice: BatchSlice,
        lap: Lap,
        *,
        plan: int,
        norms: Norms,
        numbers: StepNumbers,
        memory: MemoryUse = NOT_MEASURED,
        non_finite: int = 0,
    ) -> None:
        """Report the step that trained `batch_slice` under this plan. non_finite: steps so far, as NonFinite counts."""
        sample = StepSample(
            step=batch_slice.step,
            epoch=batch_slice.epoch,
            consumed=batch_slice.start + batch_slice.total,
            plan=plan,
            local_batch=batch_slice.local,
            total_batch=batch_slice.total,
            passes=batch_slice.passes,
            local_grad_sqnorm=_finite(norms.local),
            global_grad_sqnorm=_finite(norms.together),
            halves=norms.halves,
            sampled_batches=norms.batches,
            sync_s=numbers.sync_s,
            last_sync_s=numbers.last_sync_s,
            strategy_metrics=numbers.metrics,
            non_finite=non_finite,
            peak_bytes=memory.peak_bytes,
            memory_bytes=memory.memory_bytes,
            max_batch=memory.max_batch,
        )
        self._waiting.append((sample, lap))
        while self._waiting and (len(self._waiting) > LAG_STEPS or self._waiting[0][1].measured()):
            self._send()

    def finish(self) -> None:
        """Tell of every step, waiting for the device."""
        while self._waiting:
            self._send()

    def _send(self) -> None:
        sample, lap = self._waiting.popleft()
        times = lap.times()
        sample.step_s, sample.compute_s, sample.wait_s = times.step, times.compute, times.wait
        sample.load_s, sample.forward_s, sample.update_s = times.load, times.forward, times.update
        sample.backward_s, sample.first_bucket_s = times.backward, times.first_bucket
        self._outbox.step(sample)


class Silent:
    """Reporter of a run without an agent: it reports nothing."""

    def report(self, *_: object, **__: object) -> None: ...

    def finish(self) -> None: ...


def _finite(norm: float) -> float:
    """A training that diverges has no norm to tell; 0 is "not sampled"."""
    return norm if math.isfinite(norm) else 0.0
