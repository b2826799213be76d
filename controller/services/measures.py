"""Measurements of a cluster for Prometheus, from the messages that users are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.services.views import job_to_wire, node_to_wire
from atoll.telemetry.prometheus import Measured, Measurement
from atoll.v1 import jobs_pb2 as pb

_JOB: Final = ("job",)
_RANK: Final = ("job", "rank", "node")
_DEVICE: Final = ("node", "device")

LEADING: Final = Measurement("atoll_controller_leading", "Whether this controller leads; only then it tells the rest")
JOBS: Final = Measurement("atoll_jobs", "Jobs by phase, ended ones as long as they are kept", ("phase",))
STEP: Final = Measurement("atoll_job_step", "Steps completed; may fall back after a loss", _JOB)
EPOCH: Final = Measurement("atoll_job_epoch", "The epoch under way", _JOB)
SAMPLES: Final = Measurement("atoll_job_samples_per_second", "Of all workers, over the last seconds", _JOB)
STEP_S: Final = Measurement("atoll_job_step_seconds", "Median of the last seconds", _JOB)
PREDICTED_S: Final = Measurement("atoll_job_predicted_step_seconds", "As the newest plan has it", _JOB)
LEFT_S: Final = Measurement("atoll_job_left_seconds", "Until the last of the epochs, where that is known", _JOB)
WORKERS: Final = Measurement("atoll_job_workers", "In the current run", _JOB)
RESTARTS: Final = Measurement("atoll_job_restarts_total", "Runs that the script ended by failing", _JOB)
RUNS: Final = Measurement("atoll_job_runs_total", "Sets of workers that were started", _JOB)
CHECKPOINT: Final = Measurement("atoll_job_checkpoint_step", "The newest complete checkpoint on disk", _JOB)
MEMORY: Final = Measurement("atoll_job_memory_step", "The newest state that is whole in the machines' memory", _JOB)
REPORTED: Final = Measurement("atoll_job_reported", "The newest of each number of run.report", ("job", "name"))
SHARE: Final = Measurement("atoll_worker_share_ratio", "Of the batch", _RANK)
WAIT_S: Final = Measurement("atoll_worker_wait_seconds", "Of its newest step: waiting for others", _RANK)
COMPUTE_S: Final = Measurement("atoll_worker_compute_seconds", "Of its newest step: its own work", _RANK)
LINK: Final = Measurement("atoll_link_goodput_bytes_per_second", "While it was busy", ("job", "rank", "peer"))
NODES: Final = Measurement("atoll_nodes", "Nodes by whether they are connected", ("state",))
BUSY: Final = Measurement("atoll_device_utilization_ratio", "As the device says", _DEVICE)
USED: Final = Measurement("atoll_device_memory_used_bytes", "As the device says", _DEVICE)
WARM: Final = Measurement("atoll_device_temperature_celsius", "As the device says", _DEVICE)


def measures(epoch: LeaderEpoch | None) -> Iterator[Measured]:
    """Yield the cluster's metrics; epoch: None while this controller does not lead."""
    yield LEADING, float(epoch is not None), ()
    if epoch is None:
        return
    states = epoch.ledger.jobs.values()
    phases = Counter(state.job.status.phase.lower() for state in states)
    for phase, count in sorted(phases.items()):
        yield JOBS, count, (phase,)
    yield from of_jobs([job_to_wire(epoch, state) for state in states if not state.job.status.phase.ended])
    yield from of_nodes([node_to_wire(epoch, node) for node in epoch.sessions.nodes().values()])


def of_jobs(jobs: Iterable[pb.Job]) -> Iterator[Measured]:
    """Yield the metrics of living jobs."""
    for job in jobs:
        progress, labels = job.progress, (job.id,)
        yield from (
            (measurement, value, labels)
            for measurement, value in (
                (STEP, progress.step),
                (EPOCH, progress.epoch),
                (SAMPLES, progress.samples_per_s),
                (STEP_S, progress.step_s),
                (WORKERS, len(job.workers)),
                (RESTARTS, job.restarts),
                (RUNS, job.run),
                (CHECKPOINT, job.checkpoint_step),
                (MEMORY, job.memory_step),
            )
        )
        known = ((PREDICTED_S, job.plan.predicted_step_s), (LEFT_S, progress.left_s))  # 0: it is not known
        yield from ((measurement, value, labels) for measurement, value in known if value)
        yield from ((REPORTED, value, (job.id, name)) for name, value in sorted(progress.metrics.items()))
        for worker in job.workers:
            yield from _of_worker(job.id, worker)


def _of_worker(job: str, worker: pb.WorkerView) -> Iterator[Measured]:
    rank = str(worker.rank)
    yield SHARE, worker.share, (job, rank, worker.node)
    if worker.last.step_s:
        yield WAIT_S, worker.last.wait_s, (job, rank, worker.node)
        yield COMPUTE_S, worker.last.compute_s, (job, rank, worker.node)
    for link in worker.links:
        if link.goodput_bps:
            yield LINK, link.goodput_bps / 8, (job, rank, str(link.peer))


def of_nodes(nodes: Sequence[pb.Node]) -> Iterator[Measured]:
    yield NODES, sum(node.connected for node in nodes), ("connected",)
    yield NODES, sum(not node.connected for node in nodes), ("lost",)
    for node in nodes:
        for sample in node.samples if node.connected else ():
            device = (node.name, str(sample.index))
            if sample.HasField("utilisation"):
                yield BUSY, sample.utilisation, device
            if sample.HasField("memory_used_bytes"):
                yield USED, sample.memory_used_bytes, device
            if sample.HasField("temperature_c"):
                yield WARM, sample.temperature_c, device
