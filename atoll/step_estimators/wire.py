"""Conversion between estimates and messages. Raises nothing: received messages are checked on arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from atoll.step_estimators.estimates import BatchPoint, NodeEstimate, RankEstimate, RankProfile
from atoll.step_estimators.observed import ObservedStep
from atoll.step_estimators.sums import NormSums, SyncSums
from atoll.v1 import agents_pb2, common_pb2


def step_from_wire(sample: common_pb2.StepSample) -> ObservedStep:
    return ObservedStep(
        step=sample.step,
        plan=sample.plan,
        local_batch=sample.local_batch,
        total_batch=sample.total_batch,
        step_s=sample.step_s,
        compute_s=sample.compute_s,
        load_s=sample.load_s,
        forward_s=sample.forward_s,
        backward_s=sample.backward_s,
        first_bucket_s=sample.first_bucket_s,
        update_s=sample.update_s,
        sync_s=sample.sync_s,
        last_sync_s=sample.last_sync_s,
        local_sqnorm=sample.local_grad_sqnorm,
        global_sqnorm=sample.global_grad_sqnorm,
        halves=sample.halves,
        sampled_batches=sample.sampled_batches or 1,
        strategy_metrics=dict(sample.strategy_metrics),
    )


def estimate_to_wire(estimate: RankEstimate) -> agents_pb2.RankEstimate:
    known = math.isfinite(estimate.gamma_variance)
    return agents_pb2.RankEstimate(
        plan=estimate.plan,
        total_batch=estimate.total_batch,
        last_step=estimate.last_step,
        step_s=estimate.step_s,
        whole_steps=estimate.whole_steps,
        stall_share=estimate.stall_share,
        gamma=estimate.gamma if known else 0.0,
        gamma_variance=estimate.gamma_variance if known else 0.0,
        measured=estimate.measured,
        profile=None if estimate.profile is None else _profile_to_wire(estimate.profile),
    )


def _profile_to_wire(profile: RankProfile) -> agents_pb2.RankProfile:
    line = profile.estimate
    return agents_pb2.RankProfile(
        local_batch=profile.local_batch,
        compute_s=profile.compute_s,
        compute_error_s=profile.compute_error_s,
        steps=profile.steps,
        line=None
        if line is None
        else agents_pb2.StepLine(
            q=line.q, s=line.s, k=line.k, m=line.m, error=line.error, low_batch=line.low_batch,
            high_batch=line.high_batch,
        ),
        point_batches=[point.local_batch for point in profile.points],
        point_compute_s=[point.compute_s for point in profile.points],
        point_errors=[point.error for point in profile.points],
    )  # fmt: skip


def estimate_from_wire(message: agents_pb2.RankEstimate) -> RankEstimate:
    variance = message.gamma_variance
    return RankEstimate(
        plan=message.plan,
        total_batch=message.total_batch,
        last_step=message.last_step,
        step_s=message.step_s,
        whole_steps=message.whole_steps,
        stall_share=message.stall_share,
        gamma=min(message.gamma, 1.0),
        gamma_variance=variance if variance > 0 else math.inf,
        measured=message.measured,
        profile=_profile_from_wire(message.plan, message.profile) if message.HasField("profile") else None,
    )


def _profile_from_wire(plan: int, message: agents_pb2.RankProfile) -> RankProfile:
    line = message.line
    return RankProfile(
        plan=plan,
        local_batch=message.local_batch,
        compute_s=message.compute_s,
        compute_error_s=message.compute_error_s,
        steps=message.steps,
        estimate=NodeEstimate(
            q=line.q, s=line.s, k=line.k, m=line.m, error=line.error, low_batch=line.low_batch,
            high_batch=line.high_batch,
        )
        if message.HasField("line")
        else None,
        points=tuple(map(BatchPoint, message.point_batches, message.point_compute_s, message.point_errors)),
    )  # fmt: skip


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
