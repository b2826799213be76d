"""State that each rank keeps of its own gradients, of all tensors in one flat buffer: residuals, and DGC's velocity.

Twice: as of the last pass that counted, and as the pass under way makes it. So a pass that is broken off changes
nothing, and what a checkpoint keeps belongs to its step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup

_BUFFERS = 2


class FlatState:
    """Used by the training thread; the exchange's changes what `begin` gave it. In the memory of the model."""

    def __init__(self, layout: TensorLayout, device: torch.device) -> None:
        self._layout = layout
        self._now = torch.zeros(layout.entries, device=device)
        self._next = torch.zeros(layout.entries, device=device)
        self._not_zero = [0] * len(layout.names)  # in how many of the buffers; of each tensor
        self._reached: set[int] = set()  # tensors of the pass under way
        self.complete = False
        """Whether the pass under way counts now."""

    def open(self) -> None:
        """A pass begins; the one before counts where it was complete."""
        if self.complete:
            for index in range(len(self._layout.names)):
                if index not in self._reached and self._not_zero[index]:
                    part = slice(self._layout.first[index], self._layout.first[index + 1])
                    self._next[part].copy_(self._now[part])
            self._now, self._next = self._next, self._now
        self._reached.clear()
        self.complete = False

    def begin(self, group: TensorGroup) -> torch.Tensor:
        """The memory for what this pass makes of a group, [entries]: what was there before is in it."""
        part = self._part(group)
        self._next[part].copy_(self._now[part])
        for index in range(group.begin, group.end):
            self._not_zero[index] = _BUFFERS
            self._reached.add(index)
        return self._next[part]

    def put_back(self, index: int) -> None:
        """One tensor that this pass began stays what it was."""
        part = slice(self._layout.first[index], self._layout.first[index + 1])
        self._next[part].copy_(self._now[part])

    def live(self, index: int) -> torch.Tensor:
        """One tensor's, to be changed where there is no pass under way."""
        self._not_zero[index] = _BUFFERS
        return self._now[self._layout.first[index] : self._layout.first[index + 1]]

    def drain(self, group: TensorGroup) -> torch.Tensor | None:
        """What was left out of a group that is not compressed any more: it goes along whole. None: nothing was."""
        tensors = range(group.begin, group.end)
        self._reached.update(tensors)
        if not any(self._not_zero[index] for index in tensors):
            return None
        for index in tensors:
            self._not_zero[index] = max(self._not_zero[index] - 1, 0)
        part = self._part(group)
        self._next[part].zero_()
        return self._now[part]

    def give_back(self, index: int) -> torch.Tensor | None:
        """What was left out of one tensor, once; None: nothing. Where there is no pass under way."""
        if not self._not_zero[index]:
            return None
        self._not_zero[index] = 0
        part = slice(self._layout.first[index], self._layout.first[index + 1])
        left_out = self._now[part].clone()
        self._now[part].zero_()
        return left_out

    def by_name(self) -> dict[str, torch.Tensor]:
        """As of the last pass that counts; float32 [N], the live memory."""
        first = self._layout.first
        found = {}
        for index, name in enumerate(self._layout.names):
            buffer = self._next if self.complete and index in self._reached else self._now
            found[name] = buffer[first[index] : first[index + 1]]
        return found

    def take_over(self, left: Mapping[str, torch.Tensor]) -> None:
        """Add what another rank had left out, by name."""
        for index, name in enumerate(self._layout.names):
            if name in left:
                part = self._now[self._layout.first[index] : self._layout.first[index + 1]]
                part.add_(left[name].reshape(-1).to(part.device))
                self._not_zero[index] = _BUFFERS

    def _part(self, group: TensorGroup) -> slice:
        return slice(self._layout.first[group.begin], self._layout.first[group.end])
