"""Evaluation by all ranks together: each sample on one of them, and what they found brought together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from atoll.agent.runtime.data.loader import sample_count
from atoll.agent.runtime.data.split import split_batch
from atoll.agent.runtime.data.to_device import moved
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput


class EvaluationLoader:
    """Iterating gives this rank's part of a dataset, in its order: the parts of all ranks are the whole, each sample
    once. Each iteration splits anew, for ranks and shares change while a run goes on. All ranks iterate together: until
    the iteration ends, the model has the weights that all share."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        part: Callable[[], tuple[int, tuple[float, ...]]],
        evaluation: Callable[[], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        """batch_size: samples at a time on this rank. part: this rank, and the shares of all. evaluation: inside, the
        model is that of all ranks. Raises BadInput."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise BadInput(f"run.evaluation_loader got batch_size = {batch_size!r}; it must be 1 or more")
        sample_count(dataset)
        self._dataset, self._batch_size, self._collate_fn = dataset, batch_size, collate_fn
        self._part, self._evaluation, self._device = part, evaluation, device

    def __len__(self) -> int:
        """Batches of this rank."""
        return math.ceil(len(self._range()) / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        with self._evaluation():
            subset = Subset(self._dataset, self._range())
            for batch in DataLoader(subset, batch_size=self._batch_size, collate_fn=self._collate_fn):
                yield moved(batch, self._device)

    def _range(self) -> range:
        rank, shares = self._part()
        counts = split_batch(sample_count(self._dataset), shares)
        begin = sum(counts[:rank])
        return range(begin, begin + counts[rank])


def gathered(group: Group | None, tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor [n_rank, ...], one behind the other by rank, on this rank's device: [sum of n, ...]. A number
    counts as [1]. Collective. Raises as `gathered_parts`."""
    return torch.cat(gathered_parts(group, tensor))


def gathered_parts(group: Group | None, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts that `gathered` concatenates, by rank. Collective. Raises BadInput, on all ranks, where they
    differ in more than n; PeerLost."""
    own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if group is None:
        return [own.clone()]
    heads = [json.loads(head) for head in group.gather_bytes(json.dumps([str(own.dtype), *own.shape]).encode())]
    kinds = {(head[0], *head[2:]) for head in heads}
    if len(kinds) > 1:
        raise BadInput(
            f"ranks would gather {sorted(map(str, kinds))}; all of them give one dtype and one shape but for n"
        )
    rows = group.gather_bytes(own.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return [_read(row, own.dtype, head[1:]).to(own.device) for row, head in zip(rows, heads, strict=True)]


def _read(row: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(row), dtype=dtype).reshape(shape) if row else torch.empty(shape, dtype=dtype)
