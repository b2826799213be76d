"""Reads from a job's record the limits of decisions and the values that its next run begins with, and adds what its
run taught. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.controller.deciding.given import Policy, controller_half
from atoll.controller.jobs.model.device_memory import UNKNOWN, after_training
from atoll.controller.jobs.model.members import by_position
from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.jobs.model.offline_profile import offline_profile
from atoll.controller.jobs.model.strategy_in_force import adapted_params, strategy_of
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.controller.state.records import Adapted, JobPins, JobRecord, PlanRecord
from atoll.strategies import registry
from atoll.telemetry.telemetry_limits import ADAPTIVE


def policy_of(job: JobRecord, strategy: str, samples: int = 0) -> Policy:
    """Return the limits of decisions. strategy: by which the run trains. samples: of the dataset, which no batch may
    exceed; 0 if not known."""
    spec, adapt = job.spec, job.spec.adapt
    return Policy(
        split=spec.split,
        half=controller_half(strategy, job.settings_of(strategy)),
        adapts=adapted_params(job, strategy),
        min_batch=adapt.min_batch,
        max_batch=min(adapt.max_batch, samples) if samples else adapt.max_batch,
        rule=_rule(adapt.learning_rate, job.learned.optimizer),
        initial_batch=job.learned.initial_batch,
        batches_per_update=max(job.learned.batches_per_update, 1),
        surrogate=_surrogate(job),
        pins=pins_of(job, strategy),
    )


def _rule(asked: str, optimizer: str) -> str:
    """Return the learning rate's rule for a planner. An optimizer that is not reported counts as SGD."""
    if asked != "auto":
        return asked
    return "square-root" if optimizer == ADAPTIVE else "adascale"


def pins_of(job: JobRecord, strategy: str) -> JobPins:
    """Return the user's pins: shares only in the view whose members they were given for, and parameters only of this
    strategy."""
    same = (job.pinned.run, job.pinned.view) == (job.status.run, job.status.view)
    names = registry.find(strategy).plan_parameters.adjustable()
    params = {name: value for name, value in job.pinned.strategy_params.items() if name in names}
    return replace(job.pinned, shares=job.pinned.shares if same else (), strategy_params=params)


def _surrogate(job: JobRecord) -> Surrogate | None:
    """Return the offline profile's surrogate, None if it is of another model than the one that this job trains."""
    if not job.spec.adapt.profile:
        return None
    profile = offline_profile(job.spec.adapt.profile)
    return profile.surrogate if profile.is_of(job.learned.workload_fingerprint) else None


def begun_with(job: JobRecord, strategy: str, plan: PlanRecord) -> PlanRecord:
    """Complete a view's first plan beside its split: with pinned values, else the last view's, else the spec's."""
    adapted, adapts = job.learned.adapted or Adapted(), adapted_params(job, strategy)
    params = {name: value for name, value in _settings_of_plans(job, strategy).items() if value is not None}
    if (adapted.strategy or job.spec.strategy) == strategy:
        params |= {name: value for name, value in adapted.strategy_params.items() if name in adapts}
    params |= pins_of(job, strategy).strategy_params
    total = planned_total(job)
    factor = adapted.learning_rate_factor if job.spec.adapt.max_batch and total else 0.0
    return replace(plan, strategy_params=params, total_batch=total, learning_rate_factor=factor)


def planned_total(job: JobRecord) -> int:
    """Return the total batch that the next run begins with; 0 for the script's own."""
    adapted = job.learned.adapted.total_batch if job.learned.adapted and job.spec.adapt.max_batch else 0
    return job.pinned.total_batch or adapted


def expected_total(job: JobRecord) -> int:
    """Return the total batch that the next run begins with, also where it is the script's own; 0 if it is not known."""
    return planned_total(job) or job.learned.total_batch or job.learned.initial_batch


def adapted_by(plan: PlanRecord, strategy: str) -> Adapted:
    return Adapted(
        strategy=strategy,
        strategy_params=plan.strategy_params,
        total_batch=plan.total_batch,
        learning_rate_factor=plan.learning_rate_factor,
    )


def _settings_of_plans(job: JobRecord, strategy: str) -> dict[str, Any]:
    """Return the submitted values of the settings that plans may change."""
    names, settings = registry.find(strategy).plan_parameters.adjustable(), job.settings_of(strategy)
    return {name: settings[name] for name in names if name in settings}


def _strategy_of(observed: ObservedJob, plan: PlanRecord) -> str:
    """Return the strategy that a plan is for: that of its view."""
    view = next((one for one in observed.views.kept if one.view == plan.view), None)
    return strategy_of(observed.job, view) if view is not None else observed.strategy


def with_learned(observed: ObservedJob, job: JobRecord) -> JobRecord:
    """The job with what its current run taught so far."""
    if observed.run is None:
        return job
    members = by_position(observed.run, observed.views.in_force).members
    places = {m.rank: f"{m.node}/{m.device}" for m in members}
    training, newest = observed.training, observed.plans.newest
    ranks = training.profile.ranks if training.profile else {}
    measured = {
        places[rank]: known.compute_s / known.local_batch
        for rank, known in ranks.items()
        if rank in places and known.local_batch
    }
    memory = {
        places[rank]: after_training(job.learned.memory.get(places[rank], UNKNOWN), known)
        for rank, known in ranks.items()
        if rank in places
    }
    work = {f"{name}/{d.index}": d.work_per_s for name, node in observed.nodes.items() for d in node.record.devices}
    learned = replace(
        job.learned,
        speeds={**job.learned.speeds, **measured},
        learned_at={**job.learned.learned_at, **{name: work.get(name, 0.0) for name in measured}},
        memory={**job.learned.memory, **memory},
        total_batch=training.total_batch or job.learned.total_batch,
        initial_batch=training.batch_size or job.learned.initial_batch,
        optimizer=training.optimizer or job.learned.optimizer,
        batches_per_update=training.batches_per_update or job.learned.batches_per_update,
        adapted=adapted_by(newest, _strategy_of(observed, newest)) if newest else job.learned.adapted,
    )
    status = replace(
        job.status,
        checkpoint_step=max(training.checkpoint_step, job.status.checkpoint_step),
        memory_step=training.memory_step or job.status.memory_step,
    )
    return replace(job, learned=learned, status=status)
