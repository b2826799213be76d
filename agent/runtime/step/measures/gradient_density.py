"""Measures the share of gradient entries that are not zero, once: a strategy may leave the others out."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class GradientDensity:
    """Counts the entries that reach the weights of embeddings in the first backward pass. Gradients of other parameters
    count as dense."""

    def __init__(self, model: nn.Module) -> None:
        trained = [one for one in model.parameters() if one.requires_grad]
        self._entries = sum(one.numel() for one in trained)
        layers = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
        tables = {id(one.weight): one.weight for one in layers if one.weight.requires_grad}
        self._table_entries = {key: weight.numel() for key, weight in tables.items()}
        self._count: dict[int, torch.Tensor] = {}  # [], on the gradient's device
        self._hooks = [one.register_hook(partial(self._on_gradient, key)) for key, one in tables.items()]  # type: ignore[no-untyped-call]

    def take(self) -> float | None:
        """Return the density once it is known; None before, and afterwards."""
        if not self._count:
            return None
        dense = self._entries - sum(self._table_entries[key] for key in self._count)
        found = (dense + sum(int(one) for one in self._count.values())) / self._entries
        self._count = {}
        self.close()
        return found

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_gradient(self, key: int, gradient: torch.Tensor) -> None:
        if gradient.is_sparse:
            rows = torch.unique(gradient._indices()).numel()
            self._count[key] = torch.tensor(rows * gradient.shape[1:].numel())
        else:
            self._count[key] = torch.count_nonzero(gradient)
