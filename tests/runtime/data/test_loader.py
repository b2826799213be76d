from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_rig import AheadOfTime, Members, Numbers, epoch_of, flat, make
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from atoll.agent.runtime.data import loader as loader_module
from atoll.agent.runtime.data.loader import Loader, LoaderSettings
from atoll.agent.runtime.data.orders import StreamOrder
from atoll.agent.runtime.data.sampler import BatchSlice, Position
from atoll.agent.runtime.data.split import split_batch
from atoll.agent.runtime.plans.planned_step import PlannedStep
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.errors import AtollError, BadInput

DATA = TensorDataset(torch.zeros(20, 2))


class Stream(IterableDataset[int]):
    """Numbers in an order that it draws from the global generator, anew in each epoch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.samples), self.samples))


class StreamThatKnows(IterableDataset[int]):
    """The same; it says where it stands, and draws on the way, too."""

    def __init__(self, samples: int) -> None:
        self.left: list[int] = []
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or random.sample(range(self.samples), self.samples)
        while self.left:
            yield self.left.pop(random.randrange(len(self.left)))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])


def standing(loader: Loader[Any]) -> dict[str, Any]:
    """What a checkpoint would keep of its stream."""
    return loader.order.state_dict() if isinstance(loader.order, StreamOrder) and loader.order.stateful else {}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sample_counts_once_per_epoch_whatever_happens(data: st.DataObject) -> None:  # noqa: PLR0915 - one story
    """Runs of any size follow one another, are stopped at any step, and change shares and total batch as plans reach
    their ranks, which may also be plans that cannot be trained. Of streams, too: those that say where they stand, and
    those that are read again."""
    kind = data.draw(st.sampled_from([Numbers, Stream, StreamThatKnows]), "dataset")
    stands: dict[str, Any] = {}
    samples, batch = data.draw(st.integers(1, 60), "samples"), data.draw(st.integers(1, 17), "batch")
    drop_last = data.draw(st.booleans(), "drop_last") and samples >= batch
    epochs = data.draw(st.integers(1, 3), "epochs")
    counted: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    consumed = dict.fromkeys(range(epochs), 0)
    position, step = Position(0, 0, 0), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "DataLoader", AheadOfTime)
        while position.epoch < epochs:
            world_size, lead = data.draw(st.integers(1, 5), "world"), data.draw(st.integers(0, 3), "lead")
            options = {"samples": samples, "batch_size": batch, "drop_last": drop_last, "kind": kind}
            members = Members(world_size, position, lead, before=stands, **options)
            ends_after = data.draw(st.integers(0, 12), "steps of this run")
            plans = 0
            for epoch in range(position.epoch, epochs):
                for loader in members.loaders:
                    loader.begin_epoch(epoch)
                for batches in zip(*members.loaders, strict=True):
                    slices = [loader.current for loader in members.loaders]
                    assert all(one is not None for one in slices)
                    counts = [one.local for one in slices if one is not None]
                    first = slices[0]
                    assert first is not None
                    assert {(one.step, one.epoch, one.start, one.total) for one in slices if one is not None} == {
                        (step, epoch, first.start, first.total)
                    }
                    # Telemetry names the plan of a step, so batches that were cut ahead must follow it too.
                    planned = members.schedules[0].planned_at(step)
                    assert counts == split_batch(first.total, planned.shares)
                    most = samples if kind is Numbers else samples + 2  # a stream's end is not known before
                    assert world_size <= planned.total_batch <= most or planned.total_batch == 0
                    assert first.total == min(planned.total_batch or batch, samples - first.start)
                    assert [one.weight * one.total for one in slices if one is not None] == pytest.approx(counts)
                    for rows, count in zip(batches, counts, strict=True):
                        assert len(rows) == max(count, 1)
                        counted[epoch].update(rows.tolist()[:count])
                    if data.draw(st.booleans(), "plan"):
                        plans += 1
                        total = data.draw(st.integers(0, samples + 2), "total batch")
                        shares = tuple(float(1 + (plans * 7 + other) % 5) for other in range(world_size))
                        for rank in range(world_size):
                            members.tell(rank, plans, step + plans % 3, PlannedStep(shares, total_batch=total))
                    members.agree(step)
                    step, ends_after = step + 1, ends_after - 1
                    if ends_after <= 0:
                        break
                for loader in members.loaders:
                    loader.begin_epoch(epoch)  # the step that was handed out counts as done
                    assert loader.position == members.loaders[0].position
                position = members.loaders[0].position
                stands = standing(members.loaders[0])
                assert position.step == step
                consumed[epoch] = position.consumed
                if ends_after <= 0:
                    break
                assert members.loaders[0].batches_left == 0
                assert drop_last or position.consumed == samples
            if members.loaders[0].batches_left == 0:
                position = Position(position.epoch + 1, 0, position.step)
    for epoch, counter in counted.items():
        assert set(counter.values()) <= {1}
        assert len(counter) == consumed[epoch]


@given(st.data())
def test_what_ended_an_epoch_is_shown_again_alone_whatever_the_batches_were(data: st.DataObject) -> None:
    """1. A run goes on at the end of an epoch, with another total batch than the last step had. 2. One batch is handed
    out that ends there, nothing after it, and the position is what it was. 3. The next epoch is whole."""
    samples, world_size = data.draw(st.integers(5, 40), "samples"), data.draw(st.integers(1, 3), "world")
    drop_last, total = data.draw(st.booleans(), "drop_last"), data.draw(st.integers(3, samples), "total batch")
    consumed = data.draw(st.integers(samples - total + 1, samples), "consumed") if drop_last else samples
    end = Position(1, consumed, data.draw(st.integers(1, 30), "step"))
    handed_out: list[int] = []
    for rank in range(world_size):
        plans = PlanSchedule(world_size, PlannedStep((1.0,) * world_size, total_batch=total), samples=samples)
        loader = make(samples, rank=rank, world_size=world_size, schedule=plans, batch_size=5, drop_last=drop_last)
        loader.seek(end)
        assert loader.batches_left == 0
        loader.show_again()
        for batch in loader:
            batch_slice = loader.current
            assert batch_slice is not None
            assert (batch_slice.step, batch_slice.start + batch_slice.total) == (end.step - 1, consumed)
            handed_out += batch.tolist()[: batch_slice.local]
        assert loader.position == end
        assert len(list(loader)) == (samples // total if drop_last else -(-samples // total))
        assert loader.position.epoch == 2
    whole = flat(epoch_of(make(samples), 1))
    assert 0 < len(handed_out) <= total
    assert handed_out == whole[consumed - len(handed_out) : consumed]


@given(st.integers(2, 40), st.integers(1, 5), st.integers(5, 17))
def test_every_rank_has_two_samples_for_batch_statistics(samples: int, world_size: int, batch: int) -> None:
    """1. A model with BatchNorm1d asks for two samples or none. 2. A rank that has none trains two of others at weight
    0; it had one, which BatchNorm1d refuses. 3. Every sample counts once still."""
    counted: Counter[int] = Counter()
    loaders = [
        make(samples, rank=rank, world_size=world_size, batch_size=batch, min_local_batch=2)
        for rank in range(world_size)
    ]
    for batches in zip(*loaders, strict=True):
        slices = [loader.current for loader in loaders if loader.current is not None]
        assert sum(one.local for one in slices) == slices[0].total
        assert sum(one.weight for one in slices) == pytest.approx(1.0)
        for rows, one in zip(batches, slices, strict=True):
            assert one.weight == one.local / one.total
            assert len(rows) == (one.local or min(2, one.total))
            assert len(rows) >= 2 or one.total == 1
            counted.update(rows.tolist()[: one.local])
    assert counted == Counter(range(samples))


def test_the_order_comes_from_seed_and_epoch_alone() -> None:
    alone = epoch_of(make(), 0)
    halves = [epoch_of(make(rank=rank, world_size=2), 0) for rank in (0, 1)]
    assert [flat(parts) for parts in zip(*halves, strict=True)] == alone
    assert epoch_of(make(), 1) != alone
    assert epoch_of(make(seed=4), 0) != alone
    assert epoch_of(make(shuffle=False), 0) == [list(range(i, min(i + 6, 20))) for i in range(0, 20, 6)]


def test_it_goes_on_from_a_position_with_another_number_of_ranks() -> None:
    whole = flat(epoch_of(make(), 2))
    resumed = [make(rank=rank, world_size=3) for rank in range(3)]
    for loader in resumed:
        loader.seek(Position(epoch=2, consumed=8, step=9))
    steps = list(zip(*(epoch_of(loader, 2) for loader in resumed), strict=True))
    assert flat(flat(parts) for parts in steps) == whole[8:]
    assert resumed[0].position == Position(epoch=2, consumed=20, step=11)


def test_the_boundary_sees_the_batch_before_as_complete() -> None:
    seen: list[tuple[BatchSlice | None, Position]] = []
    loader: Loader[Any] = make(10, boundary=lambda: seen.append((loader.current, loader.position)))
    for _ in loader:
        assert loader.position.step == len(seen) - 1
    assert [position for _, position in seen] == [Position(0, 0, 0), Position(0, 6, 1), Position(0, 10, 2)]
    assert [batch_slice and (batch_slice.start, batch_slice.total) for batch_slice, _ in seen] == [None, (0, 6), (6, 4)]
    assert loader.current is None


def test_a_break_counts_the_batch_it_broke_off_after() -> None:
    seen: list[BatchSlice | None] = []
    loader: Loader[Any] = make(boundary=lambda: seen.append(loader.current))
    first = [next(iter(loader)).tolist()]
    loader.begin_epoch(0)
    assert loader.position == Position(0, 6, 1)
    rest = [batch.tolist() for batch in loader]
    assert first + rest == epoch_of(make(), 0)
    assert [batch_slice and batch_slice.step for batch_slice in seen] == [None, 0, 1, 2, 3]
    next(iter(loader))
    loader.begin_epoch(5)
    assert loader.position == Position(5, 0, 5)


def test_what_the_boundary_raises_ends_the_iteration_at_a_complete_step() -> None:
    def leave() -> None:
        if loader.position.step == 2:
            raise SystemExit(85)

    loader = make(boundary=leave)
    handed_out: list[list[int]] = []
    with pytest.raises(SystemExit):
        handed_out.extend(batch.tolist() for batch in loader)
    assert (len(handed_out), loader.position) == (2, Position(0, 12, 2))


def test_iterating_again_begins_the_next_epoch() -> None:
    loader = make()
    rounds = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert rounds == [epoch_of(make(), epoch) for epoch in range(3)]
    assert loader.position == Position(2, 20, 12)


def test_a_resume_at_the_end_of_an_epoch_has_nothing_left_of_it() -> None:
    boundaries: list[int] = []
    loader = make(boundary=lambda: boundaries.append(1))
    loader.seek(Position(3, 20, 16))
    assert epoch_of(loader, 3) == []
    assert (loader.batches_left, len(boundaries)) == (0, 1)
    assert epoch_of(loader, 4) == epoch_of(make(), 4)


def test_the_length_is_that_of_a_whole_epoch_also_after_a_resume_in_the_middle() -> None:
    """Scripts make schedules of epochs * len(loader) steps: that number must not depend on where they go on."""
    loader = make(world_size=2)
    assert len(loader) == 4
    loader.seek(Position(0, 6, 1))
    loader.begin_epoch(0)
    assert (len(loader), loader.batches_left) == (4, 3)
    assert len(list(loader)) == 3
    assert (len(loader), loader.batches_left) == (4, 0)
    assert len(make(drop_last=True)) == 3


def test_the_total_batch_follows_the_plan_and_the_length_stays_the_scripts() -> None:
    """1. Batches of 6, then one of 10 by plan 1; 2. a plan with shares alone brings back the script's own 6."""
    plans = PlanSchedule(1, samples=20)
    loader = make(schedule=plans)
    totals = []
    for batch in loader:
        totals.append((len(batch), loader.total_batch, loader.batches_left))
        if len(totals) == 1:
            plans.add(1, 0, PlannedStep((1.0,), total_batch=10))
            plans.agree(0, 1, lead=0)
        elif len(totals) == 2:
            plans.add(2, 0, PlannedStep((1.0,)))
            plans.agree(1, 2, lead=0)
    assert totals == [(6, 6, 4), (10, 10, 2), (4, 6, 1)]
    assert len(loader) == 4


def test_a_rank_without_samples_gets_one_at_weight_zero() -> None:
    loader = make(7, rank=2, world_size=3)
    batches = epoch_of(loader, 0)
    assert [len(batch) for batch in batches] == [2, 1]
    loader.begin_epoch(1)
    slices = [loader.current for _ in loader]
    third = 1 / 3
    expected = BatchSlice(step=3, epoch=1, start=6, total=1, local=0, weight=0.0, share=third, shares=(third,) * 3)
    assert slices[-1] == expected


def test_a_share_is_of_whole_batches_and_above_0_on_every_rank() -> None:
    """1. Batches of 6 are split 4, 1 and 1; an epoch's last one of 2 otherwise, and shares stay. 2. In batches of 2 two
    ranks have nothing, and count as if each had a sample."""
    for batch, shares, weights in ((6, (4 / 6, 1 / 6, 1 / 6), [4 / 6, 1.0]), (2, (0.5, 0.25, 0.25), [1.0] * 4)):
        for rank in range(3):
            schedule = PlanSchedule(3, PlannedStep((20.0, 1.0, 1.0)))
            loader = make(8, rank=rank, world_size=3, schedule=schedule, batch_size=batch)
            slices = [one for one in (loader.current for _ in loader) if one is not None]
            assert {one.share for one in slices} == {shares[rank]} == {loader.share}
            assert rank != 0 or [one.weight for one in slices] == weights


def test_an_older_iterator_cannot_be_used_beside_a_newer_one() -> None:
    loader = make()
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(BadInput, match="this iterator has ended"):
        next(older)


def test_tensors_are_indexed_as_a_whole_and_look_as_torch_would_collate_them() -> None:
    data = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    chosen = Subset(Subset(data, list(range(19, -1, -1))), [0, 2, 4, 6, 8, 10, 12])
    for dataset in (data, chosen):
        fast = list(make(dataset=dataset, batch_size=4))
        slow = list(make(dataset=dataset, batch_size=4, collate_fn=_collate_slowly))
        assert len(fast) == len(slow) == -(-len(dataset) // 4)
        for mine, theirs in zip(fast, slow, strict=True):
            assert type(mine) is type(theirs) is list
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True))


def _collate_slowly(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def test_a_dataset_may_answer_for_a_batch_at_once() -> None:
    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return indices

    asked: list[list[int]] = []
    loader = make(dataset=Batched(8), batch_size=4)
    assert [batch.tolist() for batch in loader] == asked
    assert sorted(flat(asked)) == list(range(8))


def test_batches_are_moved_to_the_device_whatever_their_shape() -> None:
    loader = make(
        4,
        batch_size=4,
        collate_fn=lambda samples: {"x": (torch.tensor(samples), "text"), "y": [torch.ones(2)]},
        device=torch.device("meta"),
    )
    (batch,) = list(loader)
    assert (batch["x"][0].device.type, batch["x"][1], batch["y"][0].device.type) == ("meta", "text", "meta")


def test_the_global_generator_is_not_drawn_from() -> None:
    before = torch.get_rng_state()
    list(make())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: make(0), "empty"),
        (lambda: make(5, drop_last=True), "drop_last drops them all"),
        (lambda: make(batch_size=0), "batch_size = 0"),
        (lambda: make(num_workers=-1), "num_workers = -1"),
        (lambda: make(num_workers=1, multiprocessing_context="threads"), "threads"),
        (lambda: make(rank=2, world_size=2), "rank 2 of 2"),
        (lambda: list(make(seed=2**80)), "seed"),
        (lambda: make().begin_epoch(-1), "epoch -1"),
        (lambda: make().seek(Position(0, 21, 4)), "20 samples"),
        (lambda: make(dataset=object()), "object has no length"),
    ],
)
def test_bad_input_is_refused_in_words(build: Callable[[], object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        build()


def test_stop_iteration_from_a_dataset_is_not_taken_for_the_end_of_the_epoch() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise StopIteration

    loader = make(dataset=Broken(8), batch_size=4)
    with pytest.raises((BadInput, RuntimeError), match="StopIteration"):
        list(loader)


def test_a_data_loader_that_asks_too_far_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "DataLoader", AheadOfTime)
    loader = make(60, num_workers=1, prefetch_factor=2)
    loader.lead = 1
    with pytest.raises(AtollError, match="more than 1 steps ahead"):
        list(loader)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (LoaderSettings(dataset=DATA, batch_size=2), "at least the number of workers .3."),
        (LoaderSettings(dataset=DATA, batch_size=4.0), "batch_size = 4.0 must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_unusable_batch_size_is_named_with_the_way_out(asked: LoaderSettings, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        asked.check(3)


def test_settings_of_a_dataloader_are_taken_over() -> None:
    def collate(rows: list[Any]) -> list[Any]:
        return rows

    own = DataLoader(DATA, batch_size=5, shuffle=False, num_workers=2, collate_fn=collate, drop_last=True)
    taken = LoaderSettings.from_dataloader(own, None)
    assert (taken.dataset, taken.batch_size, taken.shuffle) == (DATA, 5, False)
    assert (taken.num_workers, taken.collate_fn, taken.drop_last) == (2, collate, True)
    assert LoaderSettings.from_dataloader(DataLoader(DATA, shuffle=True), 6).shuffle
    assert LoaderSettings.from_dataloader(DataLoader(DATA), 6).batch_size == 6
    assert LoaderSettings.from_dataloader(DataLoader(DATA), 6).pin_memory is None
    assert LoaderSettings.from_dataloader(DataLoader(DATA), 6, pin_memory=False).pin_memory is False
    assert LoaderSettings.from_dataloader(DataLoader(DATA, pin_memory=True), 6).pin_memory


def test_dataloader_that_cuts_batches_in_its_own_way_is_refused() -> None:
    with pytest.raises(BadInput, match="its own list; Atoll cuts batches itself"):
        LoaderSettings.from_dataloader(DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), 4)
    with pytest.raises(BadInput, match="batch_size=None, so its dataset gives whole batches"):
        LoaderSettings.from_dataloader(DataLoader(DATA, batch_size=None), 4)
    forked: DataLoader[Any] = DataLoader(DATA, batch_size=4, num_workers=1, multiprocessing_context="fork")
    taken = LoaderSettings.from_dataloader(forked, None)
    with pytest.raises(BadInput, match='\'fork\' cannot be used: use "forkserver" or "spawn"'):
        Loader(taken, rank=0, seed=1, schedule=PlanSchedule(1), boundary=lambda: None)
    given: DataLoader[Any] = DataLoader(
        DATA,
        batch_size=4,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=7,
        multiprocessing_context="spawn",
    )
    taken = LoaderSettings.from_dataloader(given, None)
    assert (taken.prefetch_factor, taken.persistent_workers, taken.timeout_s) == (3, True, 7)
    assert taken.multiprocessing_context == "spawn"
    split = DistributedSampler(DATA, num_replicas=2, rank=0)
    with pytest.raises(BadInput, match=r"DistributedSampler gives each worker a part already.*shuffle=True"):
        LoaderSettings.from_dataloader(DataLoader(DATA, batch_size=4, sampler=split), None)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.0, *range(1, 20)], 30),
        RandomSampler(DATA, replacement=True, num_samples=9, generator=torch.Generator()),
        SubsetRandomSampler(range(3, 17)),
    ],
)
def test_a_sampler_is_honoured_and_gives_all_ranks_the_same_order(sampler: Any) -> None:
    """1. What it draws is drawn once for all ranks, from (seed, epoch). 2. Whoever resumes draws the same."""
    dataset = TensorDataset(torch.arange(20))
    taken = LoaderSettings.from_dataloader(DataLoader(dataset, batch_size=6, sampler=sampler), None)
    loaders = [Loader(taken, rank=rank, seed=3, schedule=PlanSchedule(2), boundary=lambda: None) for rank in (0, 1, 0)]
    loaders[2].seek(Position(1, 6, 9))
    epochs = [[[batch.tolist() for (batch,) in loader] for loader in loaders[:2]] for _ in range(2)]
    orders = [flat(flat(parts) for parts in zip(*ranks, strict=True)) for ranks in epochs]
    assert [len(order) for order in orders] == [len(sampler)] * 2
    assert orders[0] != orders[1]
    assert isinstance(sampler, RandomSampler) or 0 not in orders[0]
    assert [batch.tolist() for (batch,) in loaders[2]] == epochs[1][0][1:]
    assert loaders[0].order.digest() == loaders[1].order.digest() > 0


def test_a_sampler_that_gives_another_number_than_it_says_is_refused() -> None:
    class Wrong(Sampler[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    with pytest.raises(BadInput, match=r"Wrong gave 5 samples in epoch 0 and says len\(\) = 4"):
        list(make(sampler=Wrong()))


def test_a_stream_is_read_by_the_training_process_and_its_batches_are_made_of_its_samples() -> None:
    """1. It has no length. 2. What it draws is not the script's. 3. One that ends before the position of a checkpoint
    is another stream. 4. A stream that shares itself out among ranks is told from one that does not."""
    loader = make(dataset=Stream(20), min_local_batch=2)
    with pytest.raises(TypeError, match="a stream has no length"):
        len(loader)
    random.seed(1)
    before = (torch.get_rng_state(), random.getstate())
    batches = [batch.tolist() for batch in loader]
    assert sorted(flat(batches)) == list(range(20))
    assert [len(batch) for batch in batches] == [6, 6, 6, 2]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    loader.seek(Position(0, 24, 4))
    with pytest.raises(BadInput, match="the stream ends after 20 samples"):
        list(loader)
    digests = {
        StreamOrder(one, 1).digest() for one in ([1, 2, 3], [2, 4], [{"x": torch.ones(2)}], [{"x": torch.zeros(2)}])
    }
    assert len(digests) == 4


class Growing(Sampler[int]):
    """A sampler whose length is the dataset's at that time, backwards."""

    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data) - 1, -1, -1))


@pytest.mark.parametrize("form", ["in order", "shuffled", "sampler", "tensors", "subset"])
def test_the_length_is_read_at_each_epoch_as_torch_reads_it(form: str) -> None:
    """A dataset that grew was cut off, and one that shrank raised IndexError from inside. Plain torch reads the length
    when the loop over its DataLoader begins."""
    data = Numbers(10)
    dataset: Any = {
        "tensors": TensorDataset(torch.arange(10)),
        "subset": Subset(TensorDataset(torch.arange(40)), list(range(10))),
    }.get(form, data)
    options: dict[str, Any] = {"sampler": Growing(data)} if form == "sampler" else {"shuffle": form == "shuffled"}
    loader = make(dataset=dataset, batch_size=4, **options)
    plain: DataLoader[Any] = DataLoader(dataset, batch_size=4, **options)
    for epoch, samples in enumerate([10, 17, 3, 3]):
        data.samples = samples
        if form == "tensors":
            dataset.tensors = (torch.arange(samples) + epoch,)
        if form == "subset":
            dataset.indices = list(range(epoch, epoch + samples))
        rows, expected = (
            [torch.cat(one) if one.__class__ is list else one for one in each] for each in (loader, plain)
        )
        assert len(loader) == len(plain) == len(rows)
        if form == "shuffled":
            assert sorted(flat(row.tolist() for row in rows)) == list(range(samples))
        else:
            assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


def test_a_resume_goes_on_in_an_epoch_of_another_length() -> None:
    """1. A dataset of 6 samples grows to 20 in epoch 1; a checkpoint is at sample 12 of it, or at its end. 2. The next
    run's dataset has 6 samples at first: it must be as long again before the loop. 3. What is left comes, once."""
    data = Numbers(6)
    loader = make(dataset=data, batch_size=4, shuffle=True)
    first = [batch.tolist() for batch in loader]
    data.samples = 20
    second: list[list[int]] = []
    for batch in loader:
        second.append(batch.tolist())
        if len(second) == 4:
            middle = loader.position
    assert (middle.consumed, middle.samples, len(first)) == (12, 20, 2)

    data = Numbers(6)
    loader = make(dataset=data, batch_size=4, shuffle=True)
    loader.seek(middle)
    loader.begin_epoch(1)
    assert loader.batches_left == 2
    with pytest.raises(BadInput, match="6 samples in the middle of epoch 1, which began with 20"):
        iter(loader)
    data.samples = 20
    assert [batch.tolist() for batch in loader] == second[3:]

    data = Numbers(6)
    loader = make(dataset=data, batch_size=4, shuffle=True)
    loader.seek(Position(1, 20, 7, 20))
    loader.begin_epoch(1)
    assert loader.batches_left == 0
    loader.show_again()
    data.samples = 20
    assert [batch.tolist() for batch in loader] == second[-1:]


def test_a_length_that_does_not_fit_is_refused_where_the_epoch_begins() -> None:
    data = Numbers(10)
    loader = make(dataset=data, batch_size=4, drop_last=True)
    for epoch, (samples, why) in enumerate([(3, "3 samples are fewer than one global batch of 4"), (0, "is empty")]):
        data.samples = samples
        loader.begin_epoch(epoch)
        with pytest.raises(BadInput, match=why):
            iter(loader)
    data.samples = 10
    loader.begin_epoch(2)
    next(batches := iter(loader))
    data.samples = 9
    next(batches)  # an epoch under way stays as it began, as in torch


@pytest.mark.parametrize(
    "collate",
    [
        lambda rows: None,
        len,
        lambda rows: {"pair": (rows, {"deep": torch.tensor(rows)}), "text": "words"},
        lambda rows: torch.tensor(rows).expand(3, len(rows)),  # its first dimension is not the batch
        lambda rows: (one for one in rows),
        Counter,
    ],
    ids=["None", "a number", "nested", "transposed", "a generator", "Counter"],
)
def test_the_script_gets_what_its_collate_function_gave(collate: Callable[[list[int]], Any]) -> None:
    given: list[Any] = []

    def keeping(rows: list[int]) -> Any:
        given.append(collate(rows))
        return given[-1]

    got = list(make(6, batch_size=4, shuffle=False, collate_fn=keeping, device=torch.device("cpu")))
    assert len(got) == len(given) == 2
    assert all(one is other for one, other in zip(got, given, strict=True))
