"""A stand-in for a device's stream of copies, and for tensors that are on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from atoll.agent.runtime import staging
from atoll.agent.runtime.checkpoints.memory.shards import live_state
from atoll.agent.runtime.staging import cloned_bytes, parted


@dataclass(eq=False)
class _Copy:
    source: torch.Tensor
    into: torch.Tensor


class LateStream:
    """A CopyStream on the CPU. A copy reads when somebody waits for it or for a later one, as on a stream."""

    def __init__(self) -> None:
        self.queued: list[_Copy] = []
        self.pinned_bytes = self.most_under_way = 0
        self.marks = 0
        self.room, self.out_of_memory = 1 << 40, False
        self._ends: dict[int, int] = {}  # copies that were queued by a mark
        self._done = 0
        self.copied_after: list[int] = []  # marks

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def pinned(self, size: int) -> torch.Tensor:
        self.pinned_bytes += size
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: int) -> Callable[[], None]:
        assert 1 <= after <= self.marks
        self.copied_after.append(after)
        one = _Copy(source, into)
        self.queued.append(one)
        self.most_under_way = max(self.most_under_way, len(self.queued))

        def wait() -> None:
            while one in self.queued:
                self._copy_earliest()

        return wait

    def upload(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        return self.copy(source, into, self.mark())

    def has_room(self, size: int) -> bool:
        return size <= self.room

    def clone(self, tensors: Sequence[torch.Tensor], after: int) -> tuple[list[torch.Tensor], int]:
        if self.out_of_memory:
            raise torch.OutOfMemoryError
        assert 1 <= after <= self.marks
        clones = parted(torch.empty(cloned_bytes(tensors), dtype=torch.uint8), tensors)
        self.queued += [_Copy(one.detach(), clone) for one, clone in zip(tensors, clones, strict=True)]
        end = self.mark()
        self._ends[end] = self._done + len(self.queued)
        return clones, end

    def hold(self, mark: int) -> None:
        """The CPU is not behind anybody: what is held comes at once."""
        while self._done < self._ends[mark]:
            self._copy_earliest()

    def _copy_earliest(self) -> None:
        earliest = self.queued.pop(0)
        earliest.into.copy_(earliest.source)
        self._done += 1


def count_as_a_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all tensors do."""
    for module in (staging, live_state):
        monkeypatch.setattr(module, "on_cpu", lambda _tensor: False)
