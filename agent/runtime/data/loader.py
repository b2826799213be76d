"""The loader: this rank's part of every global batch, and the step boundary.

Batches come from torch's DataLoader, which is told by a batch sampler which samples to fetch. With worker processes it
asks for batches ahead of time, so a new plan takes effect that many steps later (`Loader.lead`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from atoll.agent.runtime.agent_link.waiting import batch_wait
from atoll.agent.runtime.data.by_value import ByValue, context_by_value, start_method, without_script
from atoll.agent.runtime.data.orders import EpochOrder, Order, StreamedSamples, StreamOrder, is_stream, mixed_seed
from atoll.agent.runtime.data.rows import as_is, tensor_rows
from atoll.agent.runtime.data.sampler import BatchSlice, BatchSlicer, Position, after
from atoll.agent.runtime.data.to_device import moved
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.errors import AtollError, BadInput, DeadlineExceeded

BatchT = TypeVar("BatchT")
_END: Final = object()
POLL_S: Final = 5.0
"""torch looks this often whether a worker process has died."""
MAX_BATCH_WAIT_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of the loader. `batch_size` is the whole job's, or of `batch_of` workers where that is not 0."""

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool | None = None
    """True: torch pins batches. None: on a CUDA device the loader copies them through pinned memory itself."""
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str = "forkserver"
    timeout_s: float = 0.0
    """The longest wait for a batch of worker processes; 0: MAX_BATCH_WAIT_S."""
    sampler: Iterable[Any] | None = None  # in place of all samples once, shuffled or not
    min_local_batch: int = 1
    """The fewest samples that a rank trains in a step: BatchNorm needs two. A rank may also have none that count."""
    batch_of: int = 0

    @staticmethod
    def from_dataloader(
        given: DataLoader[Any], batch_size: int | None, pin_memory: bool | None = None
    ) -> LoaderSettings:
        """Take over a DataLoader's settings; its batch size counts as the whole job's. pin_memory: holds where the
        DataLoader pins nothing, which is its default. Raises BadInput."""
        batches = given.batch_sampler
        if batches is None:
            raise BadInput(
                "the DataLoader has batch_size=None, so its dataset gives whole batches. Atoll cuts batches itself, as "
                "large as the plan says: let the dataset give one sample at a time, and pass batch_size"
            )
        if type(batches) is not BatchSampler:
            own = type(batches).__name__
            raise BadInput(
                f"the DataLoader has its own {own}; Atoll cuts batches itself, as large as the plan says. Pass the "
                "dataset and batch_size in its place, or a sampler that gives one sample at a time"
            )
        stream, sampler = is_stream(given.dataset), batches.sampler
        if isinstance(sampler, DistributedSampler):
            raise BadInput(
                "the DataLoader's DistributedSampler gives each worker a part already, and Atoll does that by the "
                "plan. Leave it out: shuffle=True does what it does"
            )
        plain = stream or type(sampler) is SequentialSampler or _all_once(sampler)
        return LoaderSettings(
            dataset=given.dataset,
            batch_size=batch_size if batch_size is not None else batches.batch_size,
            shuffle=_all_once(sampler),
            sampler=None if plain else sampler,
            drop_last=batches.drop_last,
            num_workers=given.num_workers,
            collate_fn=given.collate_fn,
            pin_memory=given.pin_memory or pin_memory,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=start_method(given.multiprocessing_context),
            timeout_s=given.timeout,
        )

    def check(self, world_size: int) -> None:
        """Raises BadInput naming what to do, for what users say most often; the loader checks the rest."""
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < world_size:
            raise BadInput(
                f"batch_size = {self.batch_size!r} must be a whole number of at least the number of workers "
                f"({world_size}): it is the whole job's batch, split over them. Raise it or use fewer workers"
            )


class Loader(Generic[BatchT]):
    """Iterating gives the rest of the current epoch; each sample counts once per epoch over all ranks and resumes.

    `current` is the slice of the batch last handed out, None where there is none. `position` is what is complete."""

    def __init__(
        self,
        settings: LoaderSettings,
        *,
        rank: int,
        seed: int,
        schedule: PlanSchedule,
        boundary: Callable[[], None],
        handed_out: Callable[[], None] = lambda: None,
        passes_left: Callable[[], bool] = lambda: True,
        divides: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """settings: its batch size holds where no plan says otherwise. schedule: of as many ranks as there are.
        boundary: called at the start of every __next__, also of the one that ends the epoch; what it raises ends the
        iteration. handed_out: called when the batch is there, before the script gets it; for each of its passes where
        it has several. passes_left: called between them; False if the rest counts for nothing. divides: as of
        BatchSlicer.

        device: where batches are moved to; None leaves them. Raises BadInput."""
        self.order = order = _order(settings, seed)
        if not 0 <= rank < schedule.world_size:
            raise BadInput(f"rank {rank} of {schedule.world_size} does not exist; the first is 0")
        self.lead = settings.num_workers * (_prefetched(settings) or 0)
        """How many steps ahead batches are cut."""
        self.position = Position(0, 0, 0)
        self.current: BatchSlice | None = None
        self._boundary, self._tell_handed_out, self._passes_left = boundary, handed_out, passes_left
        self._device = device
        self._slicer = BatchSlicer(
            order,
            settings.batch_size,
            settings.drop_last,
            rank,
            schedule,
            min_local_batch=settings.min_local_batch,
            batch_of=settings.batch_of,
            divides=divides,
        )
        self._drop_last = settings.drop_last
        self._seeds = (seed, rank)
        self._ahead: deque[BatchSlice] = deque()  # not handed out yet
        self._handed_out = False  # `current` is being trained on: not complete yet
        self._shown_again: tuple[BatchSlice, list[Any]] | None = None  # all that the next pass hands out
        self._exhausted = False  # the last iteration came to its epoch's end
        self._rewound = False  # the iteration goes on elsewhere
        self._pass = 0
        self._persistent = settings.persistent_workers and settings.num_workers > 0
        # Of worker processes a thread of this process pins what they give: they never touch CUDA.
        self._pinned = settings.pin_memory and torch.cuda.is_available()
        self._generator = torch.Generator()  # DataLoader would draw its workers' seed from the global one
        self._workers: Any = None  # DataLoader's iterator, while it may own processes
        self._timeout_s = settings.timeout_s or MAX_BATCH_WAIT_S
        self._data = self._fetching(settings)

    def __len__(self) -> int:
        """Global batches of a whole epoch, as schedules count them, of the script's own size; the same after a resume
        in the middle of one, and whatever the plan says."""
        return self._slicer.own_batches()

    @property
    def samples(self) -> int:
        """Return the samples of the current epoch; 0 for a stream, whose length is unknown."""
        return self.order.samples or 0

    @property
    def batches_left(self) -> int:
        """Return the batches left in this epoch under the current plan; for a stream, whether there is one."""
        return self._slicer.batches_left(self.position)

    @property
    def at_last_batch(self) -> bool:
        """Return True if the current batch ends its epoch under the current plan."""
        return self.current is not None and self._slicer.batches_left(after(self.current)) == 0

    @property
    def total_batch(self) -> int:
        """Samples of all ranks in the step under way; an epoch's last batch may be shorter."""
        return self._slicer.batch_at(self.position.step)

    @property
    def own_batch(self) -> int:
        """Samples of all ranks in a step, as the script gave it."""
        return self._slicer.own_batch

    @property
    def share(self) -> float:
        """Return this rank's share of the next whole batch, as BatchSlice.share."""
        return self._slicer.share_at(self.position.step)

    def begin_epoch(self, epoch: int) -> None:
        """Go on with `epoch` where it was left, or start it. A batch that was handed out counts as completed."""
        if epoch < 0:
            raise BadInput(f"epoch {epoch} does not exist; the first is 0")
        self._stop_pass()
        self._complete()
        if epoch != self.position.epoch:
            self.position = Position(epoch, 0, self.position.step)
        self._shown_again = None
        self._exhausted = False

    def seek(self, position: Position) -> None:
        """Go on from here, e.g. from a checkpoint. What was handed out and not completed is forgotten."""
        if position.samples:
            self.order.restore(position.epoch, position.samples)
        if min(position.epoch, position.consumed, position.step) < 0 or self._is_past(position.consumed):
            raise BadInput(
                f"{position} is not in this dataset of {self.samples} samples. Was the checkpoint of another?"
            )
        self._stop_pass()
        self.current, self._handed_out = None, False
        self.position = position
        self._shown_again = None
        self._exhausted = False

    def rewind(self, position: Position, rank: int) -> None:
        """Move the current iteration to `position`, with this rank's number in the schedule; called by `boundary`.
        Worker processes stay. Raises BadInput if `position` is of another epoch; for a dataset with a length not
        at the next epoch's begin."""
        if self.samples and position.epoch == self.position.epoch + 1 and position.consumed == 0:
            # What follows the loop runs first.
            position = Position(self.position.epoch, self.samples, position.step, self.samples)
        if position.epoch != self.position.epoch or self._is_past(position.consumed):
            raise BadInput(f"{position} is in another epoch than {self.position}, where the script is")
        self.current, self._handed_out = None, False
        self.position = position
        self._slicer.rank, self._seeds = rank, (self._seeds[0], rank)
        self._shown_again = None
        self._rewound = True

    def _is_past(self, consumed: int) -> bool:
        return self.order.samples is not None and consumed > self.order.samples

    def join(self, position: Position, rank: int) -> None:
        """Continue from `position` with this rank's number in the schedule; call before the first iteration."""
        self.seek(position)
        self._slicer.rank, self._seeds = rank, (self._seeds[0], rank)

    def show_again(self) -> None:
        """Let the next iteration yield only the epoch's last batch again; call at an epoch's end."""
        made = self._slicer.slice_ending(self.position)
        self.seek(Position(made[0].epoch, made[0].start, made[0].step))
        self._shown_again = made

    def __iter__(self) -> Iterator[BatchT]:
        """The rest of the epoch. Iterating again after its end begins the next one. One iterator at a time."""
        if self._exhausted:
            self.begin_epoch(self.position.epoch + 1)
        self._stop_pass()
        samples = self.order.samples
        self.order.begin(self.position.epoch, self.position.consumed)
        if self.order.samples != samples:
            self._end_workers()  # theirs is as long as it was
        _refuse_all_dropped(self.order, self._slicer.own_batch, self._drop_last)
        if self._rows is not None:
            self._rows.read()
        return self._iterate(self._pass)

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones."""
        self._stop_pass()
        self._end_workers()

    def _fetching(self, settings: LoaderSettings) -> DataLoader[Any]:
        """The DataLoader that fetches what `_slice_ahead` names."""
        stream = is_stream(settings.dataset)
        dataset: Dataset[Any] = StreamedSamples() if stream else settings.dataset
        plain = settings.collate_fn in (None, default_collate) and settings.worker_init_fn is None
        rows = self._rows = tensor_rows(dataset) if plain else None
        fetched: Any = dataset if rows is None else rows
        collate_fn: Any = settings.collate_fn if rows is None else as_is
        init_fn: Any = settings.worker_init_fn
        if settings.num_workers > 0:
            fetched, collate_fn, init_fn = (
                None if one is None else ByValue(one) for one in (fetched, collate_fn, init_fn)
            )
        return DataLoader(
            fetched,
            batch_sampler=_Ahead(self._slice_ahead),
            num_workers=settings.num_workers,
            collate_fn=collate_fn,
            pin_memory=bool(self._pinned),
            prefetch_factor=_prefetched(settings),
            persistent_workers=settings.num_workers > 0,  # an iteration that is rewound keeps them
            worker_init_fn=init_fn,
            multiprocessing_context=context_by_value(settings.multiprocessing_context)
            if settings.num_workers > 0
            else None,
            generator=self._generator,
        )

    def _iterate(self, this_pass: int) -> Iterator[BatchT]:
        batches: Iterator[Any] | None = None
        batch: Any
        try:
            while True:
                if this_pass != self._pass:
                    raise BadInput(
                        "this iterator has ended: the loader was iterated, moved or closed since it was made"
                    )
                self._complete()
                self._boundary()
                self.current = None
                with batch_wait.begun(self._awaited()):
                    if batches is None or self._rewound:
                        self._rewound = False
                        batches = self._start()
                    batch = next(batches, _END)
                if batch is _END and self._ahead:
                    raise BadInput("the dataset or its collate_fn raised StopIteration in the middle of an epoch")
                if batch is _END:
                    self._exhausted = True
                    return
                while True:
                    self.current, self._handed_out = self._ahead.popleft(), True
                    if self._device is not None:
                        batch = moved(batch, self._device, pinned=self._pinned)
                    self._tell_handed_out()
                    yield batch
                    if self.current is None or self.current.number in (0, self.current.passes):
                        break
                    if this_pass != self._pass or not self._passes_left():
                        break
                    batch = next(batches)
        finally:
            if this_pass == self._pass:
                self._stop_pass()

    def _start(self) -> Iterator[Any]:
        self._ahead.clear()
        seed, rank = self._seeds
        self._generator.manual_seed(mixed_seed(seed, self.position.epoch, self.position.consumed, rank))
        with without_script():
            self._workers = iter(self._data)
        if hasattr(self._workers, "_try_get_data"):
            self._workers._try_get_data = self._within_deadline(type(self._workers)._try_get_data)
        batches: Iterator[Any] = self._workers
        return batches

    def _awaited(self) -> str:
        count = self._data.num_workers
        where = f"{count} worker processes of the loader have given none" if count else "the dataset has given none"
        return (
            f"{where} in step {self.position.step}. The dataset, collate_fn or worker_init_fn is slow or hangs: look "
            f"at the stacks of {'these processes' if count else 'the script'} (py-spy dump)"
        )

    def _within_deadline(self, get: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
        """Bound torch's wait for worker processes. torch's own `timeout` would not see meanwhile that one has died."""

        def try_get(timeout: float = POLL_S) -> tuple[bool, Any]:
            found = get(self._workers, min(timeout, self._timeout_s))
            if not found[0] and (waited_s := batch_wait.waited_s(time.monotonic())) > self._timeout_s:
                raise DeadlineExceeded(
                    f"no batch for {waited_s:.0f} s: {self._awaited()}. If they need that long, give run.prepare a "
                    "DataLoader with a larger timeout"
                )
            return found

        return try_get

    def _slice_ahead(self) -> Iterator[list[Any]]:
        """Yield the indices that DataLoader draws, `lead` batches before it returns them."""
        if self._shown_again is not None:
            again, self._shown_again = self._shown_again, None
            yield from self._passes_of(again)
            return
        next_position = self.position
        while (made := self._slicer.slice_at(next_position)) is not None:
            batch_slice, _ = made
            if batch_slice.step > self.position.step + self.lead:
                raise AtollError(
                    f"batch {batch_slice.step} was cut in step {self.position.step}, more than {self.lead} steps ahead"
                )
            next_position = after(batch_slice)
            yield from self._passes_of(made)

    def _passes_of(self, made: tuple[BatchSlice, list[Any]]) -> Iterator[list[Any]]:
        for batch_slice, indices in self._slicer.in_passes(made):
            self._ahead.append(batch_slice)
            yield indices

    def _complete(self) -> None:
        if self._handed_out and self.current is not None:
            self.current = self._slicer.whole(self.current)
            self.position = after(self.current)
            self.order.completed(self.position.epoch, self.position.consumed)
        self._handed_out = False

    def _stop_pass(self) -> None:
        """The running iteration, if any, ends; its worker processes too, unless they are to persist."""
        self._pass += 1
        self._ahead.clear()
        if not self._persistent:
            self._end_workers()

    def _end_workers(self) -> None:
        # Dropping the iterator would do it too, but not while a traceback still refers to it.
        end = getattr(self._workers, "_shutdown_workers", None)
        if end is not None:
            end()
        self._workers = self._data._iterator = None


class _Ahead:
    def __init__(self, slices: Callable[[], Iterator[list[Any]]]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[list[Any]]:
        return self._slices()


def _prefetched(settings: LoaderSettings) -> int | None:
    """Batches that each worker process asks for ahead; None where there is none."""
    return (settings.prefetch_factor or 2) if settings.num_workers > 0 else None


def _order(settings: LoaderSettings, seed: int) -> Order:
    """Raises BadInput where the settings make no batches of the dataset."""
    batch, workers, prefetch = settings.batch_size, settings.num_workers, settings.prefetch_factor
    if batch < 1:
        raise BadInput(f"batch_size = {batch} must be at least 1")
    if workers < 0 or (prefetch is not None and prefetch < 1):
        raise BadInput(f"num_workers = {workers} must be 0 or more, prefetch_factor = {prefetch} at least 1")
    if is_stream(settings.dataset):
        return StreamOrder(cast("Iterable[Any]", settings.dataset), seed)
    order = EpochOrder(lambda: sample_count(settings.dataset), seed, settings.shuffle, settings.sampler)
    _refuse_all_dropped(order, batch, settings.drop_last)
    return order


def _refuse_all_dropped(order: Order, batch: int, drop_last: bool) -> None:
    if drop_last and order.samples is not None and order.samples < batch:
        raise BadInput(
            f"the dataset's {order.samples} samples are fewer than one global batch of {batch}, and drop_last "
            "drops them all. Use a smaller batch or drop_last=False"
        )


def _all_once(sampler: Iterable[Any]) -> bool:
    """Return True for the sampler that shuffle=True makes."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def known_count(settings: LoaderSettings) -> int | None:
    """The largest total batch; None where the dataset is a stream. Raises as `sample_count`."""
    return None if is_stream(settings.dataset) else sample_count(settings.dataset)


def sample_count(dataset: Dataset[Any]) -> int:
    """Raises BadInput where it has no length, no index or no sample."""
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        raise BadInput(
            f"{type(dataset).__name__} has no length or no index; both are needed here. Wrap the data in a Dataset "
            "with __len__ and __getitem__. run.prepare also takes what can be iterated alone"
        )
    samples = len(dataset)
    if samples < 1:
        raise BadInput("the dataset is empty. Check the path that it was read from")
    return samples
