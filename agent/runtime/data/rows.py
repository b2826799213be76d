"""Fast path for data that lies in tensors: a batch is one indexing operation, not one per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, TensorDataset


class TensorRows(Dataset[list[torch.Tensor]]):
    """A TensorDataset, or a Subset of one, that answers for a whole batch at once."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._tensors: tuple[torch.Tensor, ...] = ()  # one per column, [samples, ...]
        self._chosen: torch.Tensor | None = None  # int64 [chosen samples]; None: all
        self.read()

    def read(self) -> None:
        """Take over the dataset's tensors and indices as they are now: a script may change them between two epochs."""
        dataset, self._chosen = self._dataset, None
        while isinstance(dataset, Subset):
            indices = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
            self._chosen = indices if self._chosen is None else indices[self._chosen]
            dataset = dataset.dataset
        assert isinstance(dataset, TensorDataset)  # or tensor_rows had found another
        self._tensors = dataset.tensors

    def __len__(self) -> int:
        return len(self._tensors[0]) if self._chosen is None else len(self._chosen)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [rows[0] for rows in self.__getitems__([index])]

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """A finished batch, as torch's default collate would make it: one tensor [len(indices), ...] per column."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        if self._chosen is not None:
            rows = self._chosen[rows]
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._tensors]


def tensor_rows(dataset: Dataset[Any]) -> TensorRows | None:
    """The same samples in the same order, or None where `dataset` is more than tensors (a subclass, another kind)."""
    innermost = dataset
    while type(innermost) is Subset:
        innermost = innermost.dataset
    return TensorRows(dataset) if type(innermost) is TensorDataset and innermost.tensors else None


def as_is(batch: Any) -> Any:
    """The collate function of batches that are finished already."""
    return batch
