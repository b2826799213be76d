"""Telemetry of workers between two messages to the controller: bounded, the oldest dropped and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from atoll.agent.telemetry.buffer import TelemetryBuffer
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import SHA256
from atoll.step_estimators.rank import RankEstimator
from atoll.step_estimators.sums import NormSums, SyncSums, add_ranks, norms_of, sync_of
from atoll.step_estimators.wire import estimate_to_wire, step_from_wire, sums_to_wire
from atoll.telemetry.telemetry_limits import (
    FAMILIES,
    MAX_DROP_REASONS,
    MAX_LINKS,
    MAX_METRICS,
    MAX_NOTICES,
    MAX_REPORTS,
    MAX_STEPS,
    TIERS,
    flaw_of_facts,
    flaw_of_link,
    flaw_of_step,
)
from atoll.v1.agents_pb2 import Notice, Telemetry, WorkerTelemetry
from atoll.v1.common_pb2 import Level, LinkSample, Metrics, StepSample

MAX_METRIC_NAME: Final = 256
MAX_DROP_REASON: Final = 256
MESSAGE_BYTES: Final = 1024 * 1024
"""A Telemetry message is closed beyond this, so that none comes near gRPC's limit."""

_StepSums = tuple[dict[int, SyncSums], dict[int, NormSums]]
"""All-reduces and gradient samples by step."""


class Collector:
    """Measurements of the workers of this node since the last `take`. `begun` is called at a worker's first step,
    which the controller should know at once.

    Each worker of a strategy that does not ask for each step has an estimator here. What workers measured of a step
    together is added up, for at most MAX_STEPS unsent steps: the first ones are worth the least."""

    def __init__(self, begun: Callable[[], None] = lambda: None) -> None:
        self._begun = begun
        self._buffers: dict[WorkerKey, TelemetryBuffer] = {}
        self._forgotten: set[WorkerKey] = set()
        self._estimators: dict[WorkerKey, RankEstimator] = {}
        self._sums: dict[tuple[str, int, int], _StepSums] = {}  # by job, run and view
        self._views: dict[tuple[str, int], tuple[int, bool]] = {}  # by job and run: as begin_view has it

    def estimate(self, key: WorkerKey, *, estimates: bool = True) -> None:
        """Report estimates from this worker's steps from now on, not each step. estimates: False for the contrary."""
        if not estimates:
            self._estimators.pop(key, None)
        elif key not in self._estimators:
            self._estimators[key] = RankEstimator()

    def begin_view(self, job: str, run: int, view: int, *, estimates: bool) -> None:
        """Report estimates, or each step, of what workers measure from this view of the run on."""
        self._views[job, run] = (view, estimates)

    def add(self, key: WorkerKey, telemetry: WorkerTelemetry) -> None:
        """Take over what a worker sent; more than the protocol allows is cut off."""
        into = self._buffer(key)
        if not into.of_view(telemetry.view):
            return
        from_view, estimates = self._views.get((key.job, key.run), (0, False))
        if 0 < from_view <= telemetry.view:
            self.estimate(key, estimates=estimates)
        began = not into.stepped
        sound = [sample for sample in telemetry.steps if flaw_of_step(sample) is None]
        for sample in sound:
            self._take_step(key, sample, into)
        prepared = telemetry.prepared if telemetry.HasField("prepared") else None
        if prepared is not None and not SHA256.fullmatch(prepared.fingerprint):
            prepared.fingerprint = ""
        if prepared is not None and prepared.optimizer not in FAMILIES:
            prepared.optimizer = ""
        if prepared is not None and flaw_of_facts(prepared) is not None:
            prepared.refused.clear()
            prepared.tensors, prepared.strategy, prepared.gradient_density = 0, "", 0
        into.add(
            dropped_steps=len(telemetry.steps) - len(sound),
            dropped_before=telemetry.dropped_steps,
            metrics=map(_cut, telemetry.metrics[-MAX_REPORTS:]),
            notices=telemetry.notices[-MAX_NOTICES:],
            links=[_trimmed(link) for link in telemetry.links[-MAX_LINKS:] if flaw_of_link(link) is None],
            checkpoint_step=telemetry.checkpoint_step,
            memory_step=telemetry.memory_step,
            prepared=prepared,
            resumed=telemetry.resumed if telemetry.HasField("resumed") and telemetry.resumed.tier in TIERS else None,
        )
        if began and into.stepped:
            self._begun()

    def _take_step(self, key: WorkerKey, sample: StepSample, into: TelemetryBuffer) -> None:
        if key in self._estimators:
            observed = step_from_wire(sample)
            if self._estimators[key].observe(observed):
                syncs, sampled = self._sums.setdefault((key.job, key.run, into.view), ({}, {}))
                add_ranks(syncs, observed.step, sync_of(observed), MAX_STEPS)
                if (norms := norms_of(observed)) is not None:
                    add_ranks(sampled, observed.step, norms, MAX_STEPS)
        if key in self._estimators and key.rank:
            into.newest_step(sample)
        else:  # users are shown the steps of rank 0
            into.add(steps=[sample])

    def lost(self, telemetry: Telemetry) -> None:
        """Count the steps of an unsent telemetry as dropped, unless the next estimate includes them."""
        for worker in telemetry.workers:
            key = WorkerKey.of(worker.id)
            if key in self._buffers and worker.steps and not worker.HasField("estimate"):
                self._buffers[key].add(dropped_steps=len(worker.steps))

    def note(self, key: WorkerKey, level: Level.ValueType, text: str) -> None:
        """Something the agent itself has to say about a worker."""
        self._buffer(key).add(notices=[Notice(level=level, text=text)])

    def take(self) -> Iterator[Telemetry]:
        """Everything since the last call, in messages of a bounded size."""
        message = Telemetry(sums=[sums_to_wire(*run, *sums) for run, sums in self._sums.items()])
        self._sums.clear()
        bytes = message.ByteSize()
        for key, buffer in list(self._buffers.items()):
            worker = buffer.take(key.to_wire())
            estimator = self._estimators.get(key)
            if worker is not None and estimator is not None and estimator.last_step >= 0:
                worker.estimate.CopyFrom(estimate_to_wire(estimator.estimate()))
            if key in self._forgotten:
                del self._buffers[key]
                self._forgotten.discard(key)
                self._estimators.pop(key, None)
                if not any((one.job, one.run) == (key.job, key.run) for one in self._buffers):
                    self._views.pop((key.job, key.run), None)
            if worker is None:
                continue
            if message.workers and bytes + worker.ByteSize() > MESSAGE_BYTES:
                yield message
                message, bytes = Telemetry(), 0
            message.workers.append(worker)
            bytes += worker.ByteSize()
        if message.workers or message.sums:
            yield message

    def forget(self, key: WorkerKey) -> None:
        """Remove a worker once its last measurements are sent."""
        if key in self._buffers:
            self._forgotten.add(key)

    def _buffer(self, key: WorkerKey) -> TelemetryBuffer:
        return self._buffers.setdefault(key, TelemetryBuffer())


def _cut(metrics: Metrics) -> Metrics:
    names = [name for name in list(metrics.values)[:MAX_METRICS] if len(name) <= MAX_METRIC_NAME]
    return Metrics(step=metrics.step, values={name: metrics.values[name] for name in names})


def _trimmed(link: LinkSample) -> LinkSample:
    reasons = [reason for reason in sorted(link.dropped) if len(reason) <= MAX_DROP_REASON][:MAX_DROP_REASONS]
    kept = {reason: link.dropped[reason] for reason in reasons}
    link.dropped.clear()
    link.dropped.update(kept)
    return link
