"""Digests of the shared parameters, exchanged every so many sync rounds: do all ranks still hold the same weights?"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from atoll.errors import WeightsDiffer

_DIGEST: Final = struct.Struct("<Q")
KEPT_ROUNDS: Final = 16


class Digests:
    """`hear` by the transport's thread, `take` and `check` by the training thread. Nobody waits."""

    def __init__(self, rank: int, names: Sequence[str], broadcast: Callable[[int, bytes], None]) -> None:
        """names: of the tensors by number. broadcast: hand (sync round, payload) to all other ranks."""
        self._rank, self._names, self._broadcast = rank, names, broadcast
        self._partial: dict[int, dict[int, int]] = {}  # sync round -> tensor -> digest
        self._known: dict[int, dict[int, bytes]] = {}  # sync round -> rank -> digests of all tensors
        self._lock = threading.Lock()

    def take(self, taken: Iterable[tuple[int, int, int]]) -> None:
        """Own (sync round, tensor, digest), in any order; sent to the others when a sync round has all its tensors."""
        for number, tensor, digest in taken:
            tensors = self._partial.setdefault(number, {})
            tensors[tensor] = digest
            if len(tensors) == len(self._names):
                del self._partial[number]
                payload = b"".join(_DIGEST.pack(tensors[one]) for one in range(len(self._names)))
                self._remember(number, self._rank, payload)
                self._broadcast(number, payload)

    def hear(self, number: int, rank: int, payload: bytes | memoryview) -> str | None:
        """A peer's digests. Returns why they were refused, None if they were taken."""
        if len(payload) != _DIGEST.size * len(self._names):
            return "malformed"
        self._remember(number, rank, bytes(payload))
        return None

    def check(self) -> int:
        """Compare digests and return how many (sync round, peer) were equal. Raises WeightsDiffer naming the tensor."""
        with self._lock:
            compared = 0
            for number, by_rank in self._known.items():
                own = by_rank.get(self._rank)
                if own is None:
                    continue
                for rank in [rank for rank in by_rank if rank != self._rank]:
                    self._compare(number, own, rank, by_rank.pop(rank))
                    compared += 1
            while len(self._known) > KEPT_ROUNDS:
                del self._known[min(self._known)]
            return compared

    def _remember(self, number: int, rank: int, payload: bytes) -> None:
        with self._lock:
            self._known.setdefault(number, {})[rank] = payload

    def _compare(self, number: int, own: bytes, rank: int, theirs: bytes) -> None:
        if own == theirs:
            return
        size = _DIGEST.size
        differing = [
            name
            for index, name in enumerate(self._names)
            if own[index * size : (index + 1) * size] != theirs[index * size : (index + 1) * size]
        ]
        raise WeightsDiffer(
            f"the weights of {differing[0]} differ between ranks {self._rank} and {rank} after sync round {number} "
            f"({len(differing)} of {len(self._names)} tensors differ). One of the machines computes or remembers "
            "wrongly: look at its memory and its kernel log, then resume from the last checkpoint"
        )
