"""Checks what users hand to run.prepare_pipeline, and makes of it what an engine and its loader take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from atoll.agent.runtime.data.loader import LoaderSettings, sample_count
from atoll.agent.runtime.data.to_device import moved
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.errors import BadInput


def engine_parts(
    place: StagePlace,
    dataset: Dataset[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    collate_fn: Callable[[list[Any]], Any],
    *,
    batch_size: int,
    micro_batches: int,
    shuffle: bool,
    clip_norm: float | None,
) -> EngineParts:
    """Raises BadInput for a batch that is none, or that micro-batches of equal size do not make up."""
    for name, value in (("batch_size", batch_size), ("micro_batches", micro_batches)):
        check_count(name, value)
    if batch_size % micro_batches:
        raise BadInput(
            f"batch_size = {batch_size} cannot be split into {micro_batches} micro-batches of equal size. Use a "
            f"multiple of {micro_batches}"
        )
    if clip_norm is not None and not clip_norm > 0:  # NaN too
        raise BadInput(f"run.prepare_pipeline got clip_norm = {clip_norm}; it must be above 0, or left out")
    return EngineParts(
        place=place,
        clip_norm=clip_norm,
        dataset=dataset,
        shuffle=shuffle,
        batch_size=batch_size,
        micro_batches=micro_batches,
        loss=loss,
        collate_fn=collate_fn,
    )


def example_of(parts: EngineParts, device: torch.device) -> Any:
    """The inputs of a micro-batch, on the device. Raises BadInput for a dataset without samples."""
    count = min(sample_count(parts.dataset), parts.batch_size // parts.micro_batches)
    if not count:
        raise BadInput("the dataset has no samples")
    return pair_of(parts.collate_fn([parts.dataset[one] for one in range(count)]), device)[0]


def pair_of(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """(inputs, targets) on the device. Raises BadInput for a batch that is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BadInput(
            "run.prepare_pipeline trains on pairs: dataset or collate_fn have to give (inputs, targets), and gave a "
            f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        )
    inputs, targets = (moved(one, device) for one in batch)
    return inputs, targets


def round_settings(parts: EngineParts, round_batches: int, *, makes_rounds: bool) -> LoaderSettings:
    """Return the settings of a loader that gives rounds, or batches if the engine makes no rounds.

    The engine fetches the samples; the loader gives only their numbers."""
    check_count("round_batches", round_batches)
    numbers = range(sample_count(parts.dataset))
    size = parts.batch_size * (round_batches if makes_rounds else 1)
    return LoaderSettings(
        dataset=cast("Dataset[Any]", numbers),
        batch_size=size,
        shuffle=parts.shuffle,
        batch_of=parts.place.stages if makes_rounds else 0,
    )


def check_count(name: str, value: int) -> None:
    """Raises BadInput unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"run.prepare_pipeline got {name} = {value!r}; it must be a whole number of at least 1")
