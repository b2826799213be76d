"""Predicts from a run's profile what devices outside it would bring: the input of planner `admission`, and its
verdicts. Pure.

A device that was in the job before is predicted from what was learned of it. Another one is predicted from the run's
own workers, scaled by what both measured of the same fixed calculation (`work_per_s`): how well that carries over to
this training is seen from how well it does so among the workers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.controller.deciding.cost_model import NO_OVERLAP, rank_times
from atoll.controller.deciding.first import bound_of
from atoll.controller.estimators.profile import Profile
from atoll.controller.planners.batches.admission import AdmissionInput, AdmissionPlan, Offer
from atoll.controller.planners.batches.goodput import candidates_between
from atoll.controller.planners.batches.optperf import NodeModel, Overlap
from atoll.controller.planners.registry import ADMISSION, Decision
from atoll.errors import NoFeasiblePlan
from atoll.step_estimators.estimates import NodeEstimate, RankProfile, StepLine

LEARNED_ERROR: Final = 0.05
WORK_ERROR: Final = 0.1
"""Relative error of a prediction by `work_per_s`, beside the spread among the workers: a matrix product is not this
training."""
ONE_WORKER_ERROR: Final = 0.25
"""Relative error of the same prediction if a single worker shows no spread."""
FIXED_ERROR: Final = 0.05
"""Relative error of the run's step if only seconds per sample are known, not the step's fixed cost."""
UNSURE: Final = 0.1
"""A model of a worker that errs by more, in a larger run, says less of it than its seconds per sample."""
ALONE_ERROR: Final = 0.1
"""Relative error of the run's step if a single worker trains: the cost of synchronising is unmeasured."""
PAYBACK_S: Final = 600.0
"""Seconds within which the restart that adds devices must pay for itself. A job's remaining time is unknown."""
CANDIDATES: Final = 20
MAX_JUDGED: Final = 64
_WORK_AT_ONCE: Final = 16_000  # workers times offers: 0.15 s of planning


@dataclass(frozen=True, slots=True, order=True)
class RatedDevice:
    """A device by "node/device", with what its agent measured; 0 where it did not. max_batch: samples that its memory
    holds, 0 if not known."""

    name: str
    work_per_s: float
    max_batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionQuestion:
    """workers: by rank. learned: seconds per sample by name, of devices that are what they were then. batch_range:
    of the total batch; None where it stays. batches_per_update: that an update adds up. restart_s: seconds without
    training that taking devices in costs."""

    profile: Profile
    workers: Sequence[RatedDevice]
    offers: Sequence[RatedDevice]
    learned: Mapping[str, float] = field(default_factory=dict)
    split: str
    batch_range: tuple[int, int] | None
    batches_per_update: int = 1
    restart_s: float


AdmissionDecision = Decision[AdmissionInput, AdmissionPlan]


@dataclass(frozen=True, slots=True)
class AdmissionAnswer:
    """Reasons by name, of those the run should take (`admitted`, the best first), of those it should not, and of
    those that nothing is known of (`unknown`). gain: part of its time that the run saves with the admitted. planned:
    None where the planner was not asked, or found no plan."""

    admitted: Mapping[str, str]
    waiting: Mapping[str, str]
    unknown: tuple[str, ...]
    gain: float = 0.0
    planned: AdmissionDecision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model(StepLine):
    """Model of a worker or an offer. error: with its part of the batch in a larger run. coarse: the fixed cost of a
    step is not known, and counted as none."""

    coarse: bool = False

    def per_sample_s(self, batch: float) -> float:
        return self.q + self.k + (self.s + self.m) / batch

    def times(self, factor: float, error: float) -> _Model:
        return _Model(q=self.q * factor, s=self.s * factor, k=self.k * factor, m=self.m * factor, error=error)


def answer(question: AdmissionQuestion) -> AdmissionAnswer | None:
    """Judge the offers; those beyond MAX_JUDGED, or beyond what is planned in time, wait for the next assessment. None
    where the run itself is not known well enough to be compared with."""
    models = _models(question.profile, len(question.workers))
    if models is None:
        return None
    predicted = [(offer, _predicted(question, models, offer)) for offer in question.offers]
    unknown = tuple(offer.name for offer, model in predicted if model is None)
    batch = question.profile.total_batch / (len(models) + 1)
    known = [(offer, model) for offer, model in predicted if model is not None]
    known.sort(key=lambda pair: (pair[1].per_sample_s(batch), pair[0].name))
    known = known[: max(4, min(MAX_JUDGED, _WORK_AT_ONCE // len(models)))]
    if not known:
        return AdmissionAnswer({}, {}, unknown)
    overlap, larger = _overlaps(question.profile, models)
    uncertainty = _uncertainty(question.profile, models)
    bounded = [(model, worker.max_batch) for model, worker in zip(models, question.workers, strict=True)]
    try:
        decision = ADMISSION.decide(
            _planner_input(question, bounded, known, overlap=overlap, larger=larger, uncertainty=uncertainty)
        )
    except NoFeasiblePlan as error:
        return AdmissionAnswer({}, {offer.name: str(error) for offer, _ in known}, unknown)
    reasons = {verdict.name: verdict.reason.partition(": ")[2] for verdict in decision.plan.verdicts}
    admitted = {name: reasons[name] for name in decision.plan.admitted}
    waiting = {name: reason for name, reason in reasons.items() if name not in admitted}
    return AdmissionAnswer(admitted, waiting, unknown, 1 - decision.plan.time_to_accuracy, decision)


@dataclass(frozen=True, slots=True)
class Dispensable:
    """A worker without which the run is predicted to be faster, and by how much, in words. planned: with the
    run as it would be without it, to which it offers itself."""

    rank: int
    reason: str
    planned: AdmissionDecision


def dispensable(question: AdmissionQuestion) -> Dispensable | None:
    """The slowest worker, where the run gains more without it than prediction and restart take. A worker whose fixed
    cost is not known is taken to need no longer for a sample than it does now, so it is kept rather than sent away."""
    profile, ranks = question.profile, len(question.workers)
    models = _models(profile, ranks)
    if models is None or ranks < 2:
        return None
    rank = max(range(ranks), key=lambda r: (models[r].per_sample_s(profile.ranks[r].local_batch), r))
    others = [(model, question.workers[r].max_batch) for r, model in enumerate(models) if r != rank]
    overlap, _ = _overlaps(profile, models)
    slowest = (question.workers[rank], models[rank])
    uncertainty = _uncertainty(profile, models)
    asked = _planner_input(question, others, [slowest], overlap=overlap, larger=overlap, uncertainty=uncertainty)
    try:
        decision = ADMISSION.decide(asked)
    except NoFeasiblePlan:
        return None
    [verdict] = decision.plan.verdicts
    longer, needed = -(verdict.improvement or 0.0), verdict.needed + asked.cost
    if longer <= 0 or longer / (1 + longer) <= needed:
        return None
    return Dispensable(rank, verdict.reason.partition(": ")[2], decision)


def _planner_input(
    question: AdmissionQuestion,
    models: Sequence[tuple[_Model, int]],
    offers: Sequence[tuple[RatedDevice, _Model]],
    *,
    overlap: Overlap,
    larger: Overlap,
    uncertainty: float,
) -> AdmissionInput:
    """models: with the samples that each holds. overlap, larger: of the run, and with an offer. uncertainty: of the
    run's predicted step."""
    profile = question.profile
    low, high = question.batch_range or (profile.total_batch, profile.total_batch)
    return AdmissionInput.of_measured(
        candidates=candidates_between(low, high, CANDIDATES if high > low else 1),
        nodes=tuple(NodeModel.of_measured(**_node(model, held)) for model, held in models),
        gamma=overlap.gamma,
        t_o=overlap.t_o,
        t_u=overlap.t_u,
        noise_scale=profile.noise.noise_scale if profile.noise else 0.0,
        initial_batch=profile.total_batch,
        batches_per_update=question.batches_per_update,
        offers=tuple(
            Offer.of_measured(
                name=offer.name,
                uncertainty=model.error,
                t_o=larger.t_o,
                t_u=larger.t_u,
                **_node(model, offer.max_batch),
            )
            for offer, model in offers
        ),
        uncertainty=uncertainty,
        cost=min(question.restart_s / PAYBACK_S, 1.0),
        split="even" if question.split == "even" else "best",
    )


def _node(model: _Model, held: int) -> dict[str, Any]:
    # Every rank gets a sample: an idle one would never be measured again.
    return {"q": model.q, "s": model.s, "k": model.k, "m": model.m, "min_batch": 1, **bound_of(held, 1)}


def _models(profile: Profile, ranks: int) -> list[_Model] | None:
    """One for each rank; None before all have measured."""
    if profile.total_batch < 1 or any(not _measured(profile.ranks.get(rank)) for rank in range(ranks)):
        return None
    return [_model(profile.ranks[rank], ranks / (ranks + 1)) for rank in range(ranks)]


def _measured(rank: RankProfile | None) -> bool:
    return rank is not None and rank.local_batch > 0 and rank.compute_s > 0


def _model(rank: RankProfile, smaller: float) -> _Model:
    """smaller: what becomes of its batch when another worker joins."""
    known = rank.estimate
    if known is not None and known.q + known.k > 0:
        error = known.error * _reach(known, rank.local_batch * smaller)
        if error <= UNSURE:
            return _Model(q=known.q, s=known.s, k=known.k, m=known.m, error=error)
    per_sample_s = rank.compute_s / rank.local_batch
    error = rank.compute_error_s / rank.compute_s
    return _Model(q=per_sample_s, s=0.0, k=0.0, m=0.0, error=error, coarse=True)


def _reach(known: NodeEstimate, batch: float) -> float:
    """Return how much less certain a fitted line is outside of its data: two batches close together say little about
    a distant third."""
    half = (known.high_batch - known.low_batch) / 2
    away = abs(batch - known.low_batch - half)
    return math.hypot(1, away / half) if half > 0 else math.inf


def _predicted(question: AdmissionQuestion, models: Sequence[_Model], offer: RatedDevice) -> _Model | None:
    """Predict an offered device; None if neither it nor a comparable one was measured."""
    ranks = question.profile.ranks
    per_sample_s = [model.per_sample_s(max(ranks[rank].local_batch, 1)) for rank, model in enumerate(models)]
    if (learned_s := question.learned.get(offer.name, 0.0)) > 0:
        # Its fixed costs are those of the worker most like it: what was learned was learned near its batch.
        like = min(range(len(models)), key=lambda rank: abs(math.log(per_sample_s[rank] / learned_s)))
        return models[like].times(learned_s / per_sample_s[like], LEARNED_ERROR)
    work = {rank: worker.work_per_s for rank, worker in enumerate(question.workers) if worker.work_per_s > 0}
    if not work or offer.work_per_s <= 0:
        return None
    needs = {rank: per_sample_s[rank] * each for rank, each in work.items()}  # calculations per sample
    error = ONE_WORKER_ERROR
    if len(needs) > 1:
        error = math.hypot(WORK_ERROR, statistics.stdev(math.log(need) for need in needs.values()))
    middle = sorted(needs, key=lambda rank: (needs[rank], rank))[len(needs) // 2]
    return models[middle].times(work[middle] / offer.work_per_s, min(error, 1.0))


def _uncertainty(profile: Profile, models: Sequence[_Model]) -> float:
    """Return the relative error of the run's predicted step. Errors of workers are independent and count by their
    share of the batch."""
    batches = [profile.ranks[rank].local_batch for rank in range(len(models))]
    total = sum(batches)
    known = math.sqrt(sum((b / total * model.error) ** 2 for b, model in zip(batches, models, strict=True)))
    fixed = FIXED_ERROR if any(model.coarse for model in models) else 0.0
    alone = ALONE_ERROR if len(models) == 1 else 0.0
    return min(math.hypot(known, fixed, alone), 10.0)


def _overlaps(profile: Profile, models: Sequence[_Model]) -> tuple[Overlap, Overlap]:
    """Return the overlap of the run, and with one more worker: a ring carries (n - 1) / n of the gradients twice.
    Time beyond what the models explain is the same on both sides, so it counts as time after everything."""
    ranks, overlap = len(models), profile.overlap or NO_OVERLAP
    gamma, t_o, t_u = overlap.gamma, overlap.t_o, overlap.t_u
    step_s = max(rank_times(models, overlap, [profile.ranks[rank].local_batch for rank in range(ranks)]))
    rest_s = max(profile.step_s - step_s, 0.0)
    more = ranks**2 / (ranks**2 - 1) if ranks > 1 else 1.0
    return (
        Overlap.of_measured(gamma=gamma, t_o=t_o, t_u=t_u + rest_s),
        Overlap.of_measured(gamma=gamma, t_o=t_o * more, t_u=t_u * more + rest_s),
    )
