"""Methods whose islands hold the same weights after every step, and those that never exchange anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from atoll.strategies.compressed.algorithms import compressor_of, density_at, momentum_of
from atoll.strategies.compressed.codes.compressors import CodePlace
from atoll.strategies.compressed.codes.sparse_codes import compress_with_momentum
from atoll.strategies.compressed.settings import Compressed
from racing.clock import Exchange
from racing.inner import Replica, gather, mean_of, present, ring, shares

BACKWARD_SHARE: Final = 2 / 3
"""Of a step, in which DDP's buckets may leave already."""


class Alone:
    """Every island by itself. The model is the best island's, judged on held-out loss at each evaluation."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas

    def step(self, step: int) -> Sequence[Exchange]:
        for replica in self.replicas:
            replica.local_step(step)
        return ()

    def consolidated(self) -> torch.Tensor:
        return min((replica.theta for replica in self.replicas), key=self.replicas[0].task.held_out)


class OneShot(Alone):
    """Every island by itself, averaged once at each evaluation."""

    def consolidated(self) -> torch.Tensor:
        return torch.stack([replica.theta for replica in self.replicas]).mean(0)


class Ddp:
    """The mean gradient in every step. bits: 32, or 16 for bfloat16 on the wire."""

    def __init__(self, replicas: Sequence[Replica], bits: int = 32) -> None:
        self._replicas, self._bits = replicas, bits

    def step(self, step: int) -> Sequence[Exchange]:
        first = self._replicas[0]
        mean_N = torch.zeros_like(first.theta)
        for replica, share in zip(present(self._replicas), shares(self._replicas), strict=True):
            gradient_N = share * replica.gradient(step, first.theta)
            mean_N += gradient_N if self._bits == 32 else gradient_N.bfloat16().float()
        first.update(mean_N, step)
        payload = first.task.entries * self._bits / 8
        return (ring(payload, len(self._replicas), after=step, due=step + 1, overlap=BACKWARD_SHARE),)

    def consolidated(self) -> torch.Tensor:
        return self._replicas[0].theta


class PowerSgd:
    """Gradients of matrices as P Q^T of some rank, with error feedback, in every step; vectors as they are.

    Source: Vogels et al., PowerSGD, 2019, Algorithms 1 and 2."""

    def __init__(self, replicas: Sequence[Replica], rank: int = 2) -> None:
        self._replicas, self._rank = replicas, rank
        task = replicas[0].task
        self._errors = [torch.zeros_like(task.initial) for _ in replicas]
        random = torch.Generator().manual_seed(0)
        self._matrices = [
            (at, shape[0], (at.stop - at.start) // shape[0])
            for at, shape in zip(task.blocks(), task.shapes, strict=True)
            if len(shape) > 1 and (shape[0] + (at.stop - at.start) // shape[0]) * rank < at.stop - at.start
        ]  # place, rows and columns of those that factors are smaller than
        self._q = [
            torch.randn(columns, rank, generator=random).to(task.initial.device) for _, _, columns in self._matrices
        ]

    def step(self, step: int) -> Sequence[Exchange]:
        first = self._replicas[0]
        there = [pair for pair in zip(self._replicas, self._errors, strict=True) if not pair[0].away]
        given = [replica.gradient(step, first.theta) + error_N for replica, error_N in there]
        mean_N = mean_of(given, self._replicas)
        sent = first.task.entries
        for number, (at, rows, columns) in enumerate(self._matrices):
            p = torch.linalg.qr(mean_N[at].view(rows, columns) @ self._q[number]).Q
            self._q[number] = mean_N[at].view(rows, columns).T @ p
            mean_N[at] = (p @ self._q[number].T).reshape(-1)
            sent += (rows + columns) * self._rank - rows * columns
        for one, (_, error_N) in zip(given, there, strict=True):
            for at, _, _ in self._matrices:
                error_N[at] = one[at] - mean_N[at]
        first.update(mean_N, step)
        return (ring(sent * 4, len(self._replicas), after=step, due=step + 1),)

    def consolidated(self) -> torch.Tensor:
        return self._replicas[0].theta


class CompressedGradients:
    """Strategy `compressed` in one process: each island's part of the gradient by the strategy's own code, all tensors
    as one group, everybody's to everybody in every step, with error feedback."""

    def __init__(self, replicas: Sequence[Replica], settings: Compressed) -> None:
        self._replicas, self._settings, task = replicas, settings, replicas[0].task
        self._compressors = [compressor_of(settings, 0) for _ in replicas]
        self._residuals = [torch.zeros_like(task.initial) for _ in replicas]
        self._velocities = [torch.zeros_like(task.initial) for _ in replicas]

    def step(self, step: int) -> Sequence[Exchange]:
        first = self._replicas[0]
        place = CodePlace(step, 0, tuple(first.task.shapes), density_at(self._settings, step))
        sum_N, sent_bytes = torch.zeros_like(first.theta), 0
        momentum = momentum_of(self._settings)
        every = zip(self._replicas, self._compressors, self._residuals, self._velocities, strict=True)
        kept = [one for one in every if not one[0].away]
        for (replica, compressor, residual_N, velocity_N), share in zip(kept, shares(self._replicas), strict=True):
            gradient_N = share * replica.gradient(step, first.theta)
            if momentum:
                payload = compress_with_momentum(
                    compressor, gradient_N, velocity_N, residual_N, place, momentum=momentum
                )
            else:
                payload = compressor.compress(gradient_N, residual_N, place)
            compressor.decompress(payload.data, sum_N, place)
            sent_bytes = max(sent_bytes, len(payload))
        first.update(sum_N, step)
        return (gather(sent_bytes, len(self._replicas), after=step, due=step + 1),)

    def consolidated(self) -> torch.Tensor:
        return self._replicas[0].theta
