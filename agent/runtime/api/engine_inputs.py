"""Checks what users hand to run.prepare_pipeline, and makes of it what an engine and its loader take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from atoll.agent.runtime.data.loader import LoaderSettings, sample_count
from atoll.agent.runtime.step.capabilities import EngineParts
from atoll.errors import BadInput


def engine_parts(
    dataset: Dataset[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    collate_fn: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    micro_batches: int,
    shuffle: bool,
) -> EngineParts:
    """Raises BadInput for a batch that is none, or that micro-batches of equal size do not make up."""
    for name, value in (("batch_size", batch_size), ("micro_batches", micro_batches)):
        check_count(name, value)
    if batch_size % micro_batches:
        raise BadInput(
            f"batch_size = {batch_size} cannot be split into {micro_batches} micro-batches of equal size. Use a "
            f"multiple of {micro_batches}"
        )
    return EngineParts(
        dataset=dataset,
        shuffle=shuffle,
        batch_size=batch_size,
        micro_batches=micro_batches,
        loss=loss,
        collate_fn=collate_fn,
    )


def round_settings(parts: EngineParts, round_batches: int, world_size: int) -> LoaderSettings:
    """Of a loader that gives rounds. Their samples are fetched by the engine: the loader has but their numbers."""
    check_count("round_batches", round_batches)
    numbers = range(sample_count(parts.dataset))
    size = parts.batch_size * round_batches * world_size
    return LoaderSettings(dataset=cast("Dataset[Any]", numbers), batch_size=size, shuffle=parts.shuffle)


def check_count(name: str, value: int) -> None:
    """Raises BadInput unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"run.prepare_pipeline got {name} = {value!r}; it must be a whole number of at least 1")
