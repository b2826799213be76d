"""Worker half of strategy `zen`: sum dense gradients as `dense` does, sparse ones by their non-zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.backward.gradient_passes import scale_into
from atoll.agent.runtime.strategy_interface.capabilities import (
    Pass,
    Reduction,
    SeparateReduction,
    WorkerContext,
    WorkerHalf,
)
from atoll.planning.sparse_scheme import Scheme
from atoll.strategies.dense.fusion import fused_by_bytes
from atoll.strategies.dense.worker import DenseReducer
from atoll.strategies.staged_sums.exchange import StagedExchange, StagedSum
from atoll.strategies.zen.blocks import block_count
from atoll.strategies.zen.coordinates import Coordinates, countable, distinct_values, from_gradient, to_gradient
from atoll.strategies.zen.messages import largest
from atoll.strategies.zen.partitions import hash_seeds
from atoll.strategies.zen.schemes import stages_among
from atoll.strategies.zen.settings import Zen
from atoll.strategies.zen.summation import Summation
from atoll.strategies.zen.tensor import MEASURED_EVERY_ROUNDS, Measured, SeparateTensor, measured_dense, measured_of
from atoll.v1.common_pb2 import LEVEL_INFO

LARGE_ENTRIES: Final = 1 << 20
"""Entries from which a tensor's density is measured; smaller tensors are fused with others."""


def build(context: WorkerContext) -> WorkerHalf:
    reducer = ZenReducer(context)
    return WorkerHalf(reducer, measures=reducer)


class ZenReducer:
    """A SeparateReducer and its Measures."""

    def __init__(self, context: WorkerContext) -> None:
        assert isinstance(context.settings, Zen)
        self._session, self._channel = context.session, context.channel
        self._asked: Scheme | None = None if context.settings.scheme == "auto" else context.settings.scheme
        self._dense = DenseReducer(context.session.group)
        self._names = {id(parameter): name for name, parameter in context.model.named_parameters()}
        layers = [one for one in context.model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
        self._embeddings = {id(layer.weight): layer.sparse for layer in layers}
        self._tensors: dict[int, SeparateTensor] = {}  # by the parameter's index
        self._exchange: StagedExchange | None = None  # None: no tensor is summed separately
        self._summation: Summation | None = None
        self._round = 0
        self._units = self._own_units = self._all_units = 0  # of the sparse tensors, in this step

    def fuse(self, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
        """Fuse like `dense`, but keep tensors that may be sparse separate."""
        separate = [index for index, parameter in enumerate(parameters) if self._may_be_sparse(parameter)]
        self._tensors = {
            index: SeparateTensor(
                number,
                self._names[id(parameters[index])],
                parameters[index],
                self._embeddings.get(id(parameters[index]), False),
                self._asked,
            )
            for number, index in enumerate(separate)
        }
        others = [index for index in range(len(parameters)) if index not in self._tensors]
        pieces = [[others[at] for at in piece] for piece in fused_by_bytes([parameters[index] for index in others])]
        # A piece leaves once its last gradient has come.
        return sorted([*pieces, *([index] for index in separate)], key=lambda piece: piece[-1])

    def separate(self, piece: Sequence[int]) -> bool:
        return piece[0] in self._tensors

    def start(self, origin: Origin | None) -> None:
        if not self._tensors:
            return
        islands, tensors = self._channel.islands(), self._tensors.values()
        names = [tensor.name for tensor in tensors]
        most = [largest(tensor.shape) for tensor in tensors]
        self._exchange = StagedExchange(self._channel, names, most, stages_among(self._session.place.world_size))
        seeds, rank = hash_seeds(self._session.seed), self._session.place.rank
        self._summation = Summation(self._exchange, islands, rank, seeds)
        self._channel.connect_receiver(self._exchange.mailbox, names)
        self._exchange.start()

    def begin(self, opened: Pass) -> None:
        self._round += 1
        self._units = self._own_units = self._all_units = 0
        if self._exchange is not None:
            self._exchange.begin(self._round)

    def reduce(self, flat_N: torch.Tensor, used: Sequence[bool], ended: Callable[[object], None]) -> Reduction:
        return self._dense.reduce(flat_N, used, ended)

    def reduce_separate(
        self, parameter: int, gradient: torch.Tensor | None, weight: float, ended: Callable[[object], None]
    ) -> SeparateReduction:
        tensor = self._tensors[parameter]
        if tensor.dense_way:
            return self._reduce_dense(tensor, gradient, weight, ended)
        assert self._summation is not None  # begun in start
        mine = from_gradient(gradient, tensor.shape, weight)
        tally = replace(
            mine.tally,
            blocks=block_count(mine),
            distinct=distinct_values(mine) if self._looks else 0,
            goodput=self._goodput() if self._looks else math.inf,
            choice=tensor.choice,
        )
        self._units += tensor.shape.units
        self._own_units += len(mine.unit)
        sum_ = self._summation.start(tensor, mine.with_tally(tally), ended)
        return SeparateReduction(lambda: self._finish(tensor, sum_), 0)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        units = max(self._units, 1)
        return {
            "density": self._own_units / units,
            "density_of_all": self._all_units / units,
            "sent_bytes": sent_bytes,
        }

    def statistics(self) -> Mapping[str, float]:
        return {}

    def _may_be_sparse(self, parameter: nn.Parameter) -> bool:
        large = id(parameter) in self._embeddings or parameter.numel() >= LARGE_ENTRIES
        return large and countable(parameter)

    @property
    def _looks(self) -> bool:
        """Return whether this round's densities are measured. The same rounds on all ranks."""
        return self._round % MEASURED_EVERY_ROUNDS == 1

    def _finish(self, tensor: SeparateTensor, sum_: StagedSum[Coordinates]) -> torch.Tensor | None:
        assert self._exchange is not None
        assert self._summation is not None
        result = self._exchange.finish(sum_, self._session.collective_timeout_s)
        self._all_units += len(result.unit)
        if self._looks:
            self._decide(tensor, measured_of(result, tensor.shape, len(self._summation.circle)))
        tensor.adopt(result.tally.choice)
        return to_gradient(result, tensor.parameter, lambda: tensor.out)

    def _reduce_dense(
        self, tensor: SeparateTensor, gradient: torch.Tensor | None, weight: float, ended: Callable[[object], None]
    ) -> SeparateReduction:
        density = 0.0
        if gradient is None:
            tensor.out.zero_()
        else:
            scale_into(tensor.out, gradient.to_dense() if gradient.is_sparse else gradient, weight)
            if self._looks:
                density = len(from_gradient(tensor.out, tensor.shape, 1.0).unit) / tensor.shape.units
        tensor.flat[-3:] = torch.tensor([float(gradient is not None), density, float(tensor.choice)])
        reduction = self._dense.reduce(tensor.flat, (), ended)

        def wait() -> torch.Tensor | None:
            reduction.wait()
            used, densities, choice = tensor.flat[-3:].tolist()
            if self._looks:
                workers = self._session.place.world_size
                self._decide(tensor, measured_dense(min(densities / workers, 1.0), workers))
            tensor.adopt(round(choice))
            return tensor.out if used > 0 else None

        return SeparateReduction(wait, reduction.sent_bytes)

    def _decide(self, tensor: SeparateTensor, measured: Measured) -> None:
        """Choose on rank 0, which sends the choice to the others in the next round."""
        if self._session.place.rank == 0:
            workers = len(self._summation.circle) if self._summation is not None else 1
            if why := tensor.decide(workers, measured):
                self._session.notice(LEVEL_INFO, f"gradients of {why}")

    def _goodput(self) -> float:
        """Return the bytes a second of this rank's slowest link, if it was measured."""
        links = [link.goodput_bps / 8 for link in self._channel.link_samples() if link.goodput_bps > 0]
        return min(links, default=math.inf)
