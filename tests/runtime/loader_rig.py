"""Loaders over numbers, and all ranks of a run in lockstep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import chain
from typing import Any, Final

from torch.utils.data import DataLoader, Dataset

from atoll.agent.runtime.data.by_value import ByValue
from atoll.agent.runtime.data.loader import Loader, LoaderSettings
from atoll.agent.runtime.data.orders import StreamOrder
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.plans.planned_step import PlannedStep
from atoll.agent.runtime.plans.schedule import PlanSchedule

_SETTINGS: Final = {field.name for field in fields(LoaderSettings)}


class Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class AheadOfTime(DataLoader[Any]):
    """Draws from the batch sampler as far ahead as worker processes would, without any."""

    def __init__(self, dataset: Dataset[Any], **options: Any) -> None:
        self.lead = options.pop("num_workers") * (options.pop("prefetch_factor") or 0)
        options.pop("persistent_workers")
        options.pop("multiprocessing_context")
        held = {"dataset": dataset, "collate_fn": options.pop("collate_fn")}
        super().__init__(**{n: one.held if isinstance(one, ByValue) else one for n, one in held.items()}, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        indices = iter(self.batch_sampler)  # type: ignore[arg-type]
        waiting: deque[list[int]] = deque()
        for _ in range(self.lead):
            waiting.extend([batch] if (batch := next(indices, None)) is not None else [])
        while True:
            waiting.extend([batch] if (batch := next(indices, None)) is not None else [])
            if not waiting:
                return
            yield self.collate_fn([self.dataset[index] for index in waiting.popleft()])


def make(samples: int = 20, *, rank: int = 0, world_size: int = 1, **options: Any) -> Loader[Any]:
    """options: of the loader and of its settings."""
    said = {name: options.pop(name) for name in _SETTINGS & options.keys()}
    settings = LoaderSettings(**{"dataset": Numbers(samples), "batch_size": 6, **said})
    options = {"seed": 3, "schedule": PlanSchedule(world_size), "boundary": lambda: None, **options}
    return Loader(settings, rank=rank, **options)


def epoch_of(loader: Loader[Any], epoch: int) -> list[list[int]]:
    loader.begin_epoch(epoch)
    return [batch.tolist() for batch in loader]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


class Members:
    """All ranks of one run in lockstep: the control collective is a function call."""

    def __init__(
        self,
        world_size: int,
        position: Position,
        lead: int,
        *,
        before: dict[str, Any] | None = None,
        kind: Callable[[int], Dataset[int]] = Numbers,
        **options: Any,
    ) -> None:
        """before: of the stream, in the run before. kind: of dataset, of which each rank has its own."""
        samples = options.get("samples") if kind is Numbers else None
        self.schedules = [PlanSchedule(world_size, samples=samples) for _ in range(world_size)]
        self.loaders = [
            make(
                rank=rank,
                world_size=world_size,
                schedule=self.schedules[rank],
                num_workers=lead,
                prefetch_factor=1 if lead else None,
                dataset=kind(options["samples"]),
                **options,
            )
            for rank in range(world_size)
        ]
        for loader in self.loaders:
            if before and isinstance(loader.order, StreamOrder):
                loader.order.load_state_dict(before)
            loader.seek(position)

    def tell(self, rank: int, plan_id: int, from_step: int, planned: PlannedStep) -> None:
        self.schedules[rank].add(plan_id, from_step, planned)

    def agree(self, step: int) -> None:
        common = min(schedule.newest_contiguous() for schedule in self.schedules)
        for schedule, loader in zip(self.schedules, self.loaders, strict=True):
            schedule.agree(step, common, loader.lead)
