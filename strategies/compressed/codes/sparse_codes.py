"""Codes that send some entries and leave the others for later: the largest, those beyond a threshold, random ones."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import BadInput
from atoll.strategies.compressed.codes.compressors import (
    CodePlace,
    Compressor,
    Payload,
    as_payload,
    expect_bytes,
    read,
)

_COUNT_BYTES = 4
MIN_SAMPLED_ENTRIES: Final = 1 << 17
"""Entries from which a sample is taken before the largest are chosen."""
SAMPLED_ENTRIES: Final = 1 << 14
SAMPLE_MARGIN: Final = 1.2
SAMPLED_EXTRA: Final = 32
"""Entries of a sample beyond the margin: a small sample varies more."""


class Largest:
    """Code of the K = density * N entries of the largest magnitude (top-k, as in Deep Gradient Compression, Lin et al.,
    2018).

    Payload: uint32 [1] K', uint32 [K'] ascending indices, float32 [K'] values, K' <= K: zeros are not sent."""

    divisible = True

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        residual_N.add_(value_N)
        return _taken(residual_N, largest_places(residual_N, chosen_of(len(value_N), place.density)))

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        add_coordinates(payload, out_N)

    def ratio(self, place: CodePlace, entries: int) -> float:
        return 2 * place.density


def compress_with_momentum(
    compressor: Compressor,
    value_N: torch.Tensor,
    velocity_N: torch.Tensor,
    residual_N: torch.Tensor,
    place: CodePlace,
    *,
    momentum: float,
) -> Payload:
    """Add up this rank's own momentum before the largest entries are chosen (Deep Gradient Compression, Section 3.2).

        u = m u + g,  r = r + u

    Entries that are sent are cleared in r and in u (momentum factor masking). velocity_N: u, in place."""
    payload = compressor.compress(velocity_N.mul_(momentum).add_(value_N), residual_N, place)
    velocity_N.mul_(residual_N != 0)
    return payload


class Above:
    """Code of the entries whose magnitude exceeds a threshold (threshold-v, Dutta et al., 2020). Payload: as of
    Largest."""

    divisible = True

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._sent = self._seen = 0

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        residual_N.add_(value_N)
        at_K = _places(residual_N.abs() > self._threshold)
        self._sent, self._seen = self._sent + len(at_K), self._seen + len(value_N)
        return _taken(residual_N, at_K)

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        add_coordinates(payload, out_N)

    def ratio(self, place: CodePlace, entries: int) -> float:
        """Return the ratio of the payloads so far."""
        return 2 * self._sent / self._seen if self._seen else 0.02


class RandomK:
    """Code of K = density * N entries, one of each of K equal intervals, the same on all ranks, so no index travels.

    Payload: float32 [K]. Stich et al., 2018."""

    divisible = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def compress(self, value_N: torch.Tensor, residual_N: torch.Tensor, place: CodePlace) -> Payload:
        at_K = self._at(len(value_N), place, value_N.device)
        residual_N.add_(value_N)
        values_K = residual_N[at_K]
        residual_N[at_K] = 0
        return as_payload(values_K)

    def decompress(self, payload: memoryview, out_N: torch.Tensor, place: CodePlace) -> None:
        at_K = self._at(len(out_N), place, out_N.device)
        expect_bytes(payload, 4 * len(at_K))
        out_N[at_K] += read(payload, "<f4", 0, len(at_K), out_N.device)

    def ratio(self, place: CodePlace, entries: int) -> float:
        return place.density

    def _at(self, entries: int, place: CodePlace, device: torch.device) -> torch.Tensor:
        at = random_places(entries, chosen_of(entries, place.density), (self._seed, place.round, place.first))
        return torch.from_numpy(at).to(device)


def chosen_of(entries: int, density: float) -> int:
    """Return the number of entries to send: at least one if there is one."""
    return min(math.ceil(density * entries), entries)


def random_places(entries: int, count: int, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    """Return indices [count], ascending: one of each of `count` equal intervals of 0 ... entries - 1, each as likely as
    any other."""
    bounds = np.arange(count + 1, dtype=np.uint64) * np.uint64(entries) // np.uint64(max(count, 1))
    hashed: np.uint64 | NDArray[np.uint64] = np.uint64(0)
    for seed in seeds:
        hashed = _mixed(hashed + np.uint64(seed % 2**64))
    with np.errstate(over="ignore"):
        draw = _mixed(hashed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    width = bounds[1:] - bounds[:-1]
    return (bounds[:-1] + ((draw >> np.uint64(32)) * width >> np.uint64(32))).astype(np.int64)


def _mixed(value: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits by the finalizer of SplitMix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def largest_places(entry_N: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the `count` entries of the largest magnitude, ascending; of equals the first, never a zero.

    Exact. A sample gives a magnitude that somewhat more than `count` entries exceed, so that torch.topk, which takes
    by far the most time, looks at few of them."""
    size_N = entry_N.abs()
    at_K = None
    if len(size_N) > MIN_SAMPLED_ENTRIES:
        sample = size_N[:: len(size_N) // SAMPLED_ENTRIES]
        place = min(SAMPLE_MARGIN * count * len(sample) // len(size_N) + SAMPLED_EXTRA, len(sample))
        least = sample.topk(int(place), sorted=False).values.min()
        at_K = _places((size_N >= least) & (size_N > 0))
    if at_K is None or len(at_K) < count:
        at_K = _places(size_N > 0)
    if len(at_K) <= count:
        return at_K
    size_K = size_N[at_K]
    least = size_K.topk(count, sorted=False).values.min()
    above, ties = size_K > least, size_K == least
    return at_K[above | ties & (ties.cumsum(0) <= count - above.sum())]


def _places(chosen_N: torch.Tensor) -> torch.Tensor:
    return chosen_N.nonzero().view(-1)


def _taken(residual_N: torch.Tensor, at_K: torch.Tensor) -> Payload:
    """Take entries out of the residual. Return their payload."""
    values_K = residual_N[at_K]
    residual_N[at_K] = 0
    return as_payload(torch.tensor([len(at_K)], dtype=torch.int32), at_K.int(), values_K)


def add_coordinates(payload: memoryview, out_N: torch.Tensor) -> None:
    """Check indices. Raises BadInput if they do not ascend, or are outside."""
    if len(payload) < _COUNT_BYTES:
        raise BadInput(f"{len(payload)} bytes do not even hold a count")
    count = int(np.frombuffer(payload, "<u4", 1)[0])
    if count > len(out_N):
        raise BadInput(f"it says that {count} of {len(out_N)} entries are there")
    expect_bytes(payload, _COUNT_BYTES + 8 * count)
    index_K = np.frombuffer(payload, "<u4", count, _COUNT_BYTES)
    if count and (int(index_K[-1]) >= len(out_N) or bool((index_K[1:] <= index_K[:-1]).any())):
        raise BadInput(f"its indices do not ascend, or reach beyond the last of {len(out_N)} entries")
    at_K = torch.from_numpy(index_K.astype(np.int64)).to(out_N.device)
    out_N[at_K] += read(payload, "<f4", _COUNT_BYTES + 4 * count, count, out_N.device)
