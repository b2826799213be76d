"""Tells writes to tensors that a checkpoint reads where they are.

torch counts writes to a tensor, but not those by `.data`: for these a few entries are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from atoll.agent.runtime.model.memory_order import flat_view

SAMPLED: Final = 16
"""Entries of a tensor that are compared."""
_SAMPLED_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class WatchedTensors:
    """`watch` and `mark` on the training thread, `written` on any."""

    def __init__(self) -> None:
        self.tensors: Sequence[torch.Tensor] = ()
        self._places: list[int] = []
        self._versions: list[int] = []
        self._views: dict[int, torch.Tensor] = {}  # by index, of a few entries
        self._samples: dict[torch.device, tuple[list[int], torch.Tensor]] = {}  # indices, and their entries in a row

    def watch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Watch from the next `mark` on."""
        self.tensors, self._places, self._versions = tensors, [], []
        self._views, self._samples = {}, {}

    def mark(self) -> None:
        """Compare with this moment from now on, as far as torch counts writes."""
        places = [one.data_ptr() for one in self.tensors]
        if places != self._places:
            self._places, self._views = places, {}
        self._versions = [one._version for one in self.tensors]
        self._samples = {}

    def sample(self, indices: Iterable[int]) -> None:
        """Compare entries of these tensors as well. Call after `mark`, before anything is written."""
        by_device: dict[torch.device, list[int]] = {}
        for index in indices:
            if index in self._views or self._view(index):
                by_device.setdefault(self.tensors[index].device, []).append(index)
        self._samples = {device: (listed, self._entries(listed)) for device, listed in by_device.items()}

    def clear(self) -> None:
        """Nothing counts as written before the next `mark`."""
        self._versions, self._samples = [], {}

    def written(self, *, of_devices: bool = True) -> list[int]:
        """Indices of tensors that were written since `mark`. of_devices: also compare entries that are on a device,
        which waits for it."""
        if not self._versions:
            return []
        places = [one.data_ptr() for one in self.tensors]
        versions = [one._version for one in self.tensors]
        found: list[int] = []
        if places != self._places or versions != self._versions:
            pairs = zip(places, self._places, versions, self._versions, strict=True)
            found = [index for index, (place, was, version, old) in enumerate(pairs) if place != was or version != old]
        for device, (listed, was_N) in self._samples.items():
            if of_devices or device.type == "cpu":
                found += self._rewritten(listed, was_N)
        return found

    def _view(self, index: int) -> bool:
        tensor = self.tensors[index]
        flat = flat_view(tensor) if tensor.dtype in _SAMPLED_DTYPES and tensor.numel() else None
        if flat is not None:
            self._views[index] = flat[:: -(-len(flat) // SAMPLED)]
        return flat is not None

    def _entries(self, listed: Sequence[int]) -> torch.Tensor:
        return torch.cat([self._views[index] for index in listed])

    def _rewritten(self, listed: Sequence[int], was_N: torch.Tensor) -> list[int]:
        now_N = self._entries(listed)
        if torch.equal(now_N.view(torch.uint8), was_N.view(torch.uint8)):  # a NaN equals itself
            return []
        changed, at = [], 0
        for index in listed:
            until = at + len(self._views[index])
            if not torch.equal(now_N[at:until], was_N[at:until]):
                changed.append(index)
            at = until
        return changed
