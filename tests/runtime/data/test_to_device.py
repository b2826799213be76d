"""Batches of every form that scripts feed, moved to a device: none is there, and "meta" is another one than "cpu"."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from atoll.agent.runtime.api.engine_inputs import pair_of
from atoll.agent.runtime.data import to_device
from atoll.agent.runtime.data.to_device import moved

META = torch.device("meta")
Point = namedtuple("Point", "x y")


class Named(list[Any]):
    """A list with an argument and an attribute of its own."""

    def __init__(self, name: str, values: list[Any]) -> None:
        super().__init__(values)
        self.name = name


class Pair(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Pair:
        made = super().__new__(cls, (first, second))
        made.name = "pair"
        return made

    name: str


class Keys(dict[str, Any]):
    """The idiom of a dict whose keys are its attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class Encoding(UserDict[str, Any]):
    """As HF's BatchEncoding: it moves itself, in place."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Quantity:
    def __init__(self) -> None:
        self.value = torch.ones(2)

    def to(self, unit: str) -> Quantity:
        raise ValueError(f"{unit} is no unit")


@dataclass
class Plain:
    x: torch.Tensor
    note: str
    inner: Any = None
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.made.append(1)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


@attrs.define(frozen=True)
class OfAttrs:
    x: torch.Tensor


def default() -> defaultdict[str, list[torch.Tensor]]:
    made: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    made["a"].append(torch.ones(2))
    return made


def devices(value: Any) -> set[str]:
    """Where the tensors of the forms below are."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    if isinstance(value, PackedSequence):
        return {value.data.device.type}
    if isinstance(value, (dict, UserDict, MappingProxyType)):
        return set().union(*map(devices, value.values()))
    if isinstance(value, (list, tuple, deque, UserList)):
        return set().union(*map(devices, value))
    if isinstance(value, Frozen):
        return devices(value.inner)
    if isinstance(value, Plain):
        return devices(value.x) | devices(value.inner)
    return {value.x.device.type} if isinstance(value, OfAttrs) else set()


FORMS: dict[str, Any] = {
    "tensor": torch.ones(2),
    "list": [torch.ones(2), "text", 3, None],
    "list subclass": Named("batch", [torch.ones(2), 1]),
    "user list": UserList([torch.ones(2)]),
    "deque": deque([torch.ones(2)], maxlen=3),
    "tuple": (torch.ones(2), (torch.ones(1), b"bytes")),
    "tuple subclass": Pair(torch.ones(2), 1),
    "named tuple": Point(torch.ones(2), 1),
    "structure of torch": torch.ones(2, 2).max(0),
    "dict": {"a": torch.ones(2), 3: [torch.ones(1)]},
    "ordered dict": OrderedDict(a=torch.ones(2)),
    "default dict": default(),
    "dict of attributes": Keys(a=torch.ones(2), b=1),
    "user dict": UserDict(a=torch.ones(2)),
    "read-only mapping": MappingProxyType({"a": torch.ones(2)}),
    "moves itself": Encoding(a=torch.ones(2)),
    "packed sequence": pack_sequence([torch.ones(3), torch.ones(2)]),
    "dataclass": Plain(torch.ones(2), "text", {"deep": Frozen([torch.ones(1)])}),
    "frozen dataclass with slots": Frozen(Point(torch.ones(1), None)),
    "attrs": OfAttrs(torch.ones(1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_move_and_the_container_keeps_its_class(form: str) -> None:
    """List subclasses raised, dict subclasses became dict, a PackedSequence raised, a dataclass stayed on the CPU."""
    batch = FORMS[form]
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert devices(there) == {"meta"}
    if form != "moves itself":
        assert devices(batch) == {"cpu"}, "the dataset may give the same object again"
        assert moved(batch, torch.device("cpu")) is batch or form == "packed sequence"


def test_attributes_go_along_and_nothing_is_made_anew() -> None:
    named, pair, made = (moved(FORMS[form], META) for form in ("list subclass", "tuple subclass", "dataclass"))
    assert (named.name, pair.name, made.note, made.made) == ("batch", "pair", "text", [1])
    keys, filled, bounded = (moved(FORMS[form], META) for form in ("dict of attributes", "default dict", "deque"))
    assert (keys.a.device.type, keys.b, filled["new"], bounded.maxlen) == ("meta", 1, [], 3)


@pytest.mark.parametrize("batch", [None, 3, "text", Quantity(), SimpleNamespace(x=torch.ones(1)), torch.Tensor, {1, 2}])
def test_what_is_not_known_stays_as_it_is(batch: Any) -> None:
    assert moved(batch, META) is batch


class HostCopies:
    """A stand-in for pinned memory and a device that is the CPU: `made` has the pinned tensors, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[torch.Tensor] = []
        monkeypatch.setattr(to_device, "_COPYING_DEVICES", {"cpu"})
        monkeypatch.setattr(to_device, "_pinned_like", self._like)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made.append(torch.empty_like(tensor))
        return self.made[-1]


def test_on_a_device_batches_go_through_pinned_memory_that_is_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A copy from pageable memory waits for the step before. 2. One from pinned memory may be read later: what the
    dataset gave may be written again by then."""
    copies, cpu = HostCopies(monkeypatch), torch.device("cpu")
    given = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    expanded = torch.ones(1).expand(3)
    there = moved({"x": [given, expanded], "n": 3}, cpu)
    assert there["x"][0] is copies.made[0]
    assert there["x"][1] is copies.made[1]
    given.zero_()
    assert torch.equal(there["x"][0].sum(), torch.tensor(276.0))
    assert there["x"][0].stride() == given.stride()
    assert torch.equal(there["x"][1], expanded)


def test_only_plain_tensors_are_pinned_and_the_script_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass and a tensor of autograd's know more than their bytes."""
    copies, cpu = HostCopies(monkeypatch), torch.device("cpu")
    kept: list[torch.Tensor] = [
        nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
    ]
    assert all(one is given for one, given in zip(moved(kept, cpu), kept, strict=True))
    plain = torch.ones(2)
    assert moved(plain, cpu, pinned=True) is plain
    assert moved(plain, cpu, pinned=False) is plain
    assert not copies.made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: batches were NOT copied to a device")
def test_copies_are_queued_behind_the_step_and_whole_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [torch.randn(1 << 20) for _ in range(8)]
    expected = [one.clone() for one in batches]
    torch.cuda._sleep(10**8)  # the step before
    there = [moved(one, device) for one in batches]
    for one in batches:
        one.zero_()
    assert all(torch.equal(one.cpu(), given) for one, given in zip(there, expected, strict=True))


def test_an_engine_of_its_own_moves_inputs_of_every_form() -> None:
    """Under `groups` and `volunteer` only a bare tensor was moved."""
    inputs, targets = pair_of(({"ids": torch.ones(2)}, Frozen(torch.ones(1))), META)
    assert devices(inputs) == devices(targets) == {"meta"}
