"""Code of low rank: a matrix as a product of two thin ones, by one power iteration a step (PowerSGD, Vogels et al.,
2019).

Each rank's own matrix is approximated, so a payload represents itself as every other algorithm's does: M ~ P Q^T with P
= orth(M Q'), Q = M^T P, Q' of the step before. In PowerSGD factors are all-reduced, which saves bytes with many ranks
and takes two rounds; torch's hook for it is bound to the buckets of DistributedDataParallel."""

from __future__ import annotations

import torch

from atoll.strategies.compressed.codes.compressors import CodePlace, Payload, as_payload, expect_bytes, read


class LowRank:
    """Code of each tensor with two dimensions or more as a matrix [rows, rest]; others whole.

    Payload: tensor after tensor, float32 P [m, r] and Q [n, r], or the entries."""

    divisible = False

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed
        self._started: dict[int, torch.Tensor] = {}  # Q' by the tensor's first entry

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        residual_N.add_(value_N)
        parts, begin = [], 0
        for shape in place.tensors:
            rows, columns = as_matrix(shape)
            one = residual_N[begin : begin + rows * columns]
            rank = self.rank_of(shape)
            if rank == 0:
                parts.append(one.clone())
                one.zero_()
            else:
                matrix = one.view(rows, columns)
                p, q = self._factors(matrix, rank, place.first + begin)
                subtract_product(matrix, p, q)
                parts += [p.reshape(-1), q.reshape(-1)]
            begin += rows * columns
        return as_payload(*parts)

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        expect_bytes(payload, 4 * sum(self._floats(shape) for shape in place.tensors))
        begin = at = 0
        for shape in place.tensors:
            rows, columns = as_matrix(shape)
            one, rank = out_N[begin : begin + rows * columns], self.rank_of(shape)
            if rank == 0:
                one.add_(read(payload, "<f4", at, rows * columns, out_N.device))
            else:
                p = read(payload, "<f4", at, rows * rank, out_N.device).view(rows, rank)
                q = read(payload, "<f4", at + 4 * rows * rank, columns * rank, out_N.device).view(columns, rank)
                subtract_product(one.view(rows, columns), -p, q)
            begin, at = begin + rows * columns, at + 4 * self._floats(shape)

    def ratio(self, place: CodePlace, entries: int) -> float:
        return sum(self._floats(shape) for shape in place.tensors) / max(entries, 1) if place.tensors else 1.0

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """Return the rank of the factors; 0 if two matrices would be no smaller."""
        rows, columns = as_matrix(shape)
        return self._rank if len(shape) > 1 and self._rank * (rows + columns) < rows * columns else 0

    def _floats(self, shape: tuple[int, ...]) -> int:
        rows, columns = as_matrix(shape)
        rank = self.rank_of(shape)
        return rank * (rows + columns) if rank else rows * columns

    def _factors(self, matrix: torch.Tensor, rank: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        before = self._started.get(first)
        if before is None or before.shape != (matrix.shape[1], rank):
            generator = torch.Generator().manual_seed((self._seed + first) % 2**63)
            before = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix.device)
        p = torch.linalg.qr(matrix @ before).Q.contiguous()
        q = matrix.T @ p
        self._started[first] = q
        return p, q.contiguous()


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; a scalar is one entry."""
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def subtract_product(matrix_MN: torch.Tensor, p_MR: torch.Tensor, q_NR: torch.Tensor) -> None:
    """Subtract P Q^T from the matrix column by column: BLAS would give other bits on another processor."""
    for column in range(p_MR.shape[1]):
        matrix_MN.sub_(p_MR[:, column : column + 1] * q_NR[:, column].unsqueeze(0))
