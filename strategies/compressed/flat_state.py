"""State that each rank keeps of its own gradients, for all tensors in one flat buffer: residuals, and DGC's velocity.

It is kept twice: after the last pass that counted, and after the pass under way. So an aborted pass changes nothing,
and a checkpoint's state belongs to its step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup


class FlatState:
    """State in the memory of the model. The training thread uses it; the exchange's thread changes the memory that
    `begin` returned."""

    def __init__(self, layout: TensorLayout, device: torch.device) -> None:
        self._layout = layout
        self._now = torch.zeros(layout.entries, device=device)
        self._next = torch.zeros(layout.entries, device=device)
        # Of each tensor, whether the buffer may hold anything but zeros. They change places with the buffers.
        self._now_filled, self._next_filled = ([False] * len(layout.names) for _ in range(2))
        self._reached: set[int] = set()  # tensors of the pass under way
        self.complete = False
        """True if the pass under way counts now."""

    def open(self) -> None:
        """Begin a pass; the one before counts if it was complete."""
        if self.complete:
            for index in range(len(self._layout.names)):
                if index not in self._reached and (self._now_filled[index] or self._next_filled[index]):
                    self.put_back(index)
            self._now, self._next = self._next, self._now
            self._now_filled, self._next_filled = self._next_filled, self._now_filled
        self._reached.clear()
        self.complete = False

    def begin(self, group: TensorGroup) -> torch.Tensor:
        """Return the memory for the group's state after this pass, [entries], filled with the state before it."""
        part = self._part(group)
        self._next[part].copy_(self._now[part])
        for index in range(group.begin, group.end):
            self._next_filled[index] = True
            self._reached.add(index)
        return self._next[part]

    def after(self, group: TensorGroup) -> torch.Tensor:
        """Return what `begin` returned for this group."""
        return self._next[self._part(group)]

    def put_back(self, index: int) -> None:
        """Undo this pass's change of one tensor."""
        self._next[self._tensor(index)].copy_(self._now[self._tensor(index)])
        self._next_filled[index] = self._now_filled[index]

    def before(self, index: int) -> torch.Tensor:
        """Return one tensor's state before this pass, [entries]."""
        return self._now[self._tensor(index)]

    def live(self, index: int) -> torch.Tensor:
        """Return one tensor's state, to be changed while no pass is under way."""
        self._now_filled[index] = True
        return self._now[self._tensor(index)]

    def drain(self, group: TensorGroup) -> torch.Tensor | None:
        """Return the residual of a group that is no longer compressed, and leave zeros; None if there is none."""
        tensors = range(group.begin, group.end)
        self._reached.update(tensors)
        if any(self._next_filled[index] for index in tensors):
            self._next[self._part(group)].zero_()
            for index in tensors:
                self._next_filled[index] = False
        return self._now[self._part(group)] if any(self._now_filled[index] for index in tensors) else None

    def give_back(self, index: int) -> torch.Tensor | None:
        """Return one tensor's residual once, while no pass is under way; None if there is none."""
        if not self._now_filled[index]:
            return None
        self._now_filled[index] = False
        left_out = self._now[self._tensor(index)].clone()
        self._now[self._tensor(index)].zero_()
        return left_out

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the state after the last pass that counts, by name; float32 [N], the live memory."""
        found = {}
        for index, name in enumerate(self._layout.names):
            buffer = self._next if self.complete and index in self._reached else self._now
            found[name] = buffer[self._tensor(index)]
        return found

    def take_over(self, left: Mapping[str, torch.Tensor]) -> None:
        """Add the state of another rank, by name."""
        for index, name in enumerate(self._layout.names):
            if name in left:
                part = self.live(index)
                part.add_(left[name].reshape(-1).to(part.device))

    def _tensor(self, index: int) -> slice:
        return slice(self._layout.first[index], self._layout.first[index + 1])

    def _part(self, group: TensorGroup) -> slice:
        return slice(self._layout.first[group.begin], self._layout.first[group.end])
