"""Conversion between estimates and messages. Raises nothing: received messages are checked on arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from atoll.step_estimators.estimates import BatchPoint, NodeEstimate, RankEstimate, RankProfile
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.sums import NormSums, SyncSums
from atoll.v1 import agents_pb2, common_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def _shared_names(kind: type[DataclassInstance], message: type[Message]) -> list[str]:
    """Return the names of the plain fields that a dataclass and a message have in common."""
    plain = {field.name for field in message.DESCRIPTOR.fields if field.message_type is None}
    return [field.name for field in fields(kind) if field.name in plain]


_STEP: Final = _shared_names(ObservedStep, common_pb2.StepSample)
_RANK: Final = _shared_names(RankEstimate, agents_pb2.RankEstimate)
_PROFILE: Final = _shared_names(RankProfile, agents_pb2.RankProfile)
_LINE: Final = _shared_names(NodeEstimate, agents_pb2.StepLine)


def _values(of: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def step_from_wire(sample: common_pb2.StepSample) -> ObservedStep:
    values = _values(sample, _STEP) | {"sampled_batches": sample.sampled_batches or 1, "passes": sample.passes or 1}
    return ObservedStep(**values, strategy_metrics=dict(sample.strategy_metrics))


def estimate_to_wire(estimate: RankEstimate) -> agents_pb2.RankEstimate:
    message = agents_pb2.RankEstimate(**_values(estimate, _RANK))
    if not math.isfinite(estimate.gamma_variance):
        message.gamma_variance = 0.0
    if (profile := estimate.profile) is not None:
        columns = zip(*profile.points, strict=True) if profile.points else ((), (), ())
        point_batches, point_compute_s, point_errors = columns
        message.profile.CopyFrom(
            agents_pb2.RankProfile(
                **_values(profile, _PROFILE),
                line=agents_pb2.StepLine(**_values(profile.estimate, _LINE)) if profile.estimate else None,
                point_batches=point_batches,
                point_compute_s=point_compute_s,
                point_errors=point_errors,
            )
        )
    return message


def estimate_from_wire(message: agents_pb2.RankEstimate) -> RankEstimate:
    values, told, profile = _values(message, _RANK), message.profile, None
    values |= {"gamma": min(message.gamma, 1.0), "gamma_variance": message.gamma_variance or math.inf}
    if message.HasField("profile"):
        profile = RankProfile(
            plan=message.plan,
            **_values(told, _PROFILE),
            estimate=NodeEstimate(**_values(told.line, _LINE)) if told.HasField("line") else None,
            points=tuple(map(BatchPoint, told.point_batches, told.point_compute_s, told.point_errors)),
        )
    return RankEstimate(**values, profile=profile)


def sums_to_wire(
    job: str, run: int, view: int, syncs: Mapping[int, SyncSums], norms: Mapping[int, NormSums]
) -> agents_pb2.StepSums:
    """Each by step."""
    return agents_pb2.StepSums(
        job=job,
        run=run,
        view=view,
        steps=syncs,
        ranks=[each.ranks for each in syncs.values()],
        sync_s=[each.sync_s for each in syncs.values()],
        last_sync_s=[each.last_sync_s for each in syncs.values()],
        sampled_steps=norms,
        total_batches=[each.total_batch for each in norms.values()],
        sampled_ranks=[each.ranks for each in norms.values()],
        samples=[each.samples for each in norms.values()],
        weighted_sqnorms=[each.weighted for each in norms.values()],
        combined_sqnorms=[each.combined for each in norms.values()],
        halves=[each.halves for each in norms.values()],
    )


def syncs_from_wire(sums: agents_pb2.StepSums) -> Iterator[tuple[int, SyncSums]]:
    return zip(sums.steps, map(SyncSums, sums.ranks, sums.sync_s, sums.last_sync_s), strict=True)


def norms_from_wire(sums: agents_pb2.StepSums) -> Iterator[tuple[int, NormSums]]:
    counts = (sums.total_batches, sums.sampled_ranks, sums.samples)
    columns = (*counts, sums.weighted_sqnorms, sums.combined_sqnorms, sums.halves)
    return zip(sums.sampled_steps, map(NormSums, *columns), strict=True)
