"""Trains with loader workers on classes that it defines itself, without a main guard. Prints the outcome as JSON."""

from __future__ import annotations

import enum
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, _utils, get_worker_info

import atoll
from atoll.agent.runtime.data.loader import Loader, LoaderSettings
from atoll.agent.runtime.plans.schedule import PlanSchedule

assert multiprocessing.parent_process() is None, "a loader's worker imported the script"
SCALE = 2.0
_utils.MP_STATUS_CHECK_INTERVAL = 0.5  # the seconds after which torch ends a worker process that is stuck


class Mine(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.arange(40.0).reshape(40, 1)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return self.rows[index] * SCALE, worker.id, self.rows.is_shared()


class Kind(enum.Enum):
    ODD = 1
    EVEN = 2


class Pair(NamedTuple):
    rows: torch.Tensor
    kinds: list[Kind]


@dataclass(frozen=True, slots=True)
class Nested:
    pair: Pair
    count: int


class SpoiledSample(Exception):
    """Raised by what a worker calls."""


class MadeInWorker:
    """What a stream gives: it goes to a worker beside its number."""

    made = 0

    def __init__(self, number: int) -> None:
        self.number = number
        MadeInWorker.made += 1


class Samples:
    def __iter__(self) -> Iterator[MadeInWorker]:
        return map(MadeInWorker, range(6))


def paired(rows: list[Any]) -> Nested:
    kinds = [Kind.ODD if int(row[0]) % 4 else Kind.EVEN for row, *_ in rows]
    return Nested(Pair(torch.stack([row for row, *_ in rows]), kinds), len(rows))


def spoiled(_: Any) -> Any:
    raise SpoiledSample("sample 7")


def in_worker(rows: list[MadeInWorker]) -> Any:
    """A batch of a class that the training process does not have."""

    class Numbers:
        def __init__(self) -> None:
            self.rows = rows

    return Numbers()


def unsendable(_: Any) -> Any:
    return threading.Lock()


def stuck(_: Any) -> None:
    threading.Event().wait()


def batches(dataset: Any, **settings: Any) -> list[Any]:
    """An epoch of a loader with one worker process."""
    said = LoaderSettings(dataset=dataset, batch_size=3, num_workers=1, shuffle=False, **settings)
    loader: Loader[Any] = Loader(said, rank=0, seed=1, schedule=PlanSchedule(1), boundary=lambda: None)
    try:
        return list(loader)
    finally:
        loader.close()


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the cases differ in what they raise
        return type(error), str(error)
    raise AssertionError("nothing was raised")


run = atoll.init()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
given: DataLoader[Any] = DataLoader(
    Mine(), batch_size=10, num_workers=2, collate_fn=lambda rows: [*zip(*rows, strict=True), paired(rows)]
)
model, optimizer, loader = run.prepare(model, optimizer, given)
seen: dict[str, set[Any]] = {"rows": set(), "workers": set(), "shared": set()}
for _ in run.epochs(1):
    for rows, workers, shared, nested in loader:
        assert (type(nested), type(nested.pair)) == (Nested, Pair)
        assert all(kind in Kind for kind in nested.pair.kinds)
        assert torch.equal(nested.pair.rows, torch.stack(rows))
        seen["rows"] |= {row.item() for row in rows}
        seen["workers"] |= set(workers)
        seen["shared"] |= set(shared)
        run.backward(model(torch.stack(rows)).mean())
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({name: sorted(found) for name, found in seen.items()}))

error, text = raised(partial(batches, Mine(), collate_fn=spoiled))
assert error is SpoiledSample
assert "sample 7" in text
assert raised(partial(batches, Mine(), worker_init_fn=spoiled))[0] is SpoiledSample
error, text = raised(partial(batches, Mine(), collate_fn=unsendable))
assert error is atoll.errors.BadInput
assert "lock cannot be sent between the training process" in text
error, text = raised(partial(batches, Mine(), collate_fn=stuck, timeout_s=0.5))
assert error is atoll.errors.DeadlineExceeded
assert "1 worker processes of the loader have given none in step 0" in text

streamed = batches(Samples(), collate_fn=in_worker)
assert [sample.number for one in streamed for sample in one.rows] == list(range(6))
assert {type(sample) for one in streamed for sample in one.rows} == {MadeInWorker}
assert MadeInWorker.made == 6, "the class in this process was set back to what a worker knew"
