"""Keeps in a job's record what its run teaches about devices and batches, for the next first plan. Pure."""

from __future__ import annotations

from dataclasses import replace

from atoll.controller.jobs.model.members import by_position
from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.jobs.model.policy import adapted_by
from atoll.controller.state.records import JobRecord


def with_learned(observed: ObservedJob, job: JobRecord) -> JobRecord:
    """The job with what its current run taught so far."""
    if observed.run is None:
        return job
    members = by_position(observed.run, observed.views.in_force).members
    places = {m.rank: f"{m.node}/{m.device}" for m in members}
    training = observed.training
    ranks = training.profile.ranks if training.profile else {}
    measured = {
        places[rank]: known.compute_s / known.local_batch
        for rank, known in ranks.items()
        if rank in places and known.local_batch
    }
    work = {f"{name}/{d.index}": d.work_per_s for name, node in observed.nodes.items() for d in node.record.devices}
    learned = replace(
        job.learned,
        speeds={**job.learned.speeds, **measured},
        learned_at={**job.learned.learned_at, **{name: work.get(name, 0.0) for name in measured}},
        total_batch=training.total_batch or job.learned.total_batch,
        initial_batch=training.batch_size or job.learned.initial_batch,
        optimizer=training.optimizer or job.learned.optimizer,
        batches_per_update=training.batches_per_update or job.learned.batches_per_update,
        adapted=adapted_by(observed.plans.newest) if observed.plans.newest else job.learned.adapted,
    )
    status = replace(
        job.status,
        checkpoint_step=max(training.checkpoint_step, job.status.checkpoint_step),
        memory_step=training.memory_step or job.status.memory_step,
    )
    return replace(job, learned=learned, status=status)
