"""Strategy `dense`: the exact gradient of the whole batch, by an all-reduce of whole gradients in every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.strategy_interface.capabilities import Pass, Reduction, WorkerContext, WorkerHalf
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.dense.fusion import fused_by_bytes


def build(context: WorkerContext) -> WorkerHalf:
    return WorkerHalf(DenseReducer(context.session.group))


class DenseReducer:
    """A TensorReducer. In a run of one worker there is nothing to reduce, and it is not called."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def start(self, origin: Origin | None) -> None: ...

    def fuse(self, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
        return fused_by_bytes(parameters)

    def begin(self, opened: Pass) -> None: ...

    def reduce(self, flat_N: torch.Tensor, used: Sequence[bool], ended: Callable[[object], None]) -> Reduction:
        assert self._group is not None
        under_way = self._group.begin_sum(flat_N, "combining gradients")
        under_way.then(ended)
        ranks = self._group.world_size
        return Reduction(under_way.wait, 2 * (ranks - 1) * flat_N.numel() * flat_N.element_size() // ranks)

    def close(self) -> None: ...
