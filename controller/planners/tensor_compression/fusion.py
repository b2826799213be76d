"""Choose which tensors are compressed and sent as one.

Source: Cupcake (Wang, 2023), chapter 5, for the costs. The paper searches up to 2^(N-1) groupings; the search here is
exact and polynomial (kernels/planning/fusion.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from atoll.controller.planners.tensor_compression.compression import SecondsPerByte, TensorBytes, TensorTimes
from atoll.kernels.timeline import fuse
from atoll.planning.schemas import Schema, Seconds

MAX_FUSED = 2_048
"""Tensors of one input. The search takes time that grows with their square."""


class LinkCost(Schema):
    """Seconds to send: alpha + beta * bytes."""

    alpha: Seconds
    beta: SecondsPerByte


class CompressCost(LinkCost):
    """Seconds to compress on the device of the backward pass: alpha + beta * max(bytes, floor_bytes)."""

    floor_bytes: TensorBytes = 0


class FusionInput(Schema):
    """tensors: in the order of the backward pass. communicate: on one link, one group after the other."""

    tensors: Annotated[tuple[TensorTimes, ...], Field(min_length=1, max_length=MAX_FUSED)]
    forward_s: Seconds
    compress: CompressCost
    communicate: LinkCost


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """groups: indices of the consecutive tensors of each group. iteration_time: seconds."""

    groups: tuple[tuple[int, ...], ...]
    iteration_time: float


def plan_fusion(given: FusionInput) -> FusionPlan:
    """Return the groups with the shortest iteration. Exact."""
    compress, communicate = given.compress, given.communicate
    ends, end_s = fuse(
        [(float(tensor.bytes), tensor.backward_s) for tensor in given.tensors],
        (compress.alpha, compress.beta, float(compress.floor_bytes)),
        (communicate.alpha, communicate.beta),
    )
    groups = tuple(tuple(range(begin, end)) for begin, end in pairwise([0, *ends]))
    return FusionPlan(groups, given.forward_s + end_s)
