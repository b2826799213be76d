from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.errors import CheckpointError


def there_and_back(state: dict[str, Any]) -> dict[str, Any]:
    tensors, scalars = pack_state(state)
    return unpack_state(tensors, json.loads(json.dumps(scalars, allow_nan=False)))


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    return [types(item) for item in value] if isinstance(value, (list, tuple)) else type(value)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), nested, max_size=4))
def test_plain_values_come_back_equal_and_of_the_same_type(state: dict[str, Any]) -> None:
    back = there_and_back(state)
    assert back == state
    assert types(back) == types(state)
    assert repr(back) == repr(state)  # tells 0.0 from -0.0, and keeps the order of keys


def test_containers_come_back_as_what_they_are() -> None:
    """A milestones Counter came back as a dict, whose missing keys raise: after a resume MultiStepLR failed."""
    state: dict[str, Any] = {
        "counter": Counter({5: 2, "x": 0}),
        "ordered": OrderedDict([("b", 1), ("a", [{1.5}])]),
        "lists": defaultdict(list, {"a": [1]}),
        "plain": defaultdict(None, {1: 2}),
        "sets": [{1, "a", None}, frozenset({2}), set()],
        "deque": deque([1, (2, 3)], maxlen=4),
        "complex": complex(math.inf, -0.0),
        "raw": [b"\x00\xff", bytearray(b"a")],
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])],
        "keys": {(1, ("a",)): 1, b"k": 2, 1j: 3, None: 4},
        "array": deque([np.arange(3)]),
    }
    back = there_and_back(state)
    assert np.array_equal(back.pop("array")[0], state.pop("array")[0])
    assert back == state
    # Types, order, maxlen. At width 1 sets are printed sorted: their own order differs from process to process.
    assert pformat(back, width=1, sort_dicts=False) == pformat(state, width=1, sort_dicts=False)
    assert types(back) == types(state)
    back["lists"]["new"].append(3)
    assert (back["counter"]["missing"], back["lists"]["new"]) == (0, [3])


def test_what_looks_like_a_tag_is_data() -> None:
    state = {"tensor": "x", "a": {"tensor": "a"}, "b": {"dict": []}, "c": {"float": "inf"}, "__metadata__": [1]}
    assert there_and_back(state) == state


def test_numbers_that_json_lacks_come_back() -> None:
    back = there_and_back({"inf": math.inf, "minus": -math.inf, "nan": math.nan})
    assert (back["inf"], back["minus"], math.isnan(back["nan"])) == (math.inf, -math.inf, True)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_tensors_of_every_kind_come_back_from_disk(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], header: Any
) -> None:
    from atoll.agent.runtime.checkpoints.disk import files

    tensor = (torch.rand(shape) * 9).to(dtype)
    tensors, scalars = pack_state({"a": {"t": tensor, "u": torch.ones(2, dtype=torch.int8)}})
    read = files.read(files.write(tmp_path, header(), tensors, scalars))
    back = unpack_state(read.tensors, read.scalars)["a"]["t"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    if tensor.numel():
        raw = [torch.view_as_real(one) if one.is_complex() else one for one in (back, tensor)]
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in raw))


def test_views_and_strides_do_not_matter() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"t": base.t(), "column": base[:, 1], "wide": base[:1].expand(5, 4), "grad": base.clone().requires_grad_()}
    back = there_and_back(state)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    assert not back["grad"].requires_grad


def test_tied_tensors_are_kept_once_and_come_back_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    tensors, scalars = pack_state({"model": model.state_dict()})
    assert list(tensors) == ["model/embed.weight"]
    back = unpack_state(tensors, scalars)["model"]
    assert back["embed.weight"] is back["head.weight"]


def test_names_that_collide_are_kept_apart() -> None:
    state = {"a/b": {"c": torch.zeros(1)}, "a": {"b/c": torch.ones(1)}, "__metadata__": torch.full((1,), 2.0)}
    tensors, scalars = pack_state(state)
    assert len(tensors) == 3
    assert "__metadata__" not in tensors
    assert [float(t) for t in (unpack_state(tensors, scalars)["a/b"]["c"], tensors["a/b/c~2"])] == [0.0, 1.0]


def test_numpy_values_come_back_as_numpy_values() -> None:
    state: dict[str, Any] = {
        "f": np.float32(0.1),
        "b": np.bool_(True),
        "a": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "big": np.array([1.5], ">f8"),
    }
    back = there_and_back(state)
    assert (type(back["f"]), back["f"], type(back["b"]), bool(back["b"])) == (np.float32, state["f"], np.bool_, True)
    assert back["a"].dtype == np.int16
    assert np.array_equal(back["a"], state["a"])
    assert np.array_equal(back["big"], state["big"])


def test_a_real_optimizer_and_module_continue_from_it() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(5))
    packed = pack_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, copy=True)
    train(model, optimizer, range(5, 10))
    resumed, resumed_optimizer = build()
    state = unpack_state(*packed)
    assert isinstance(state["model"], OrderedDict)
    assert state["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    train(resumed, resumed_optimizer, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_copy_does_not_move_with_training() -> None:
    tensor = torch.zeros(2)
    live, kept = pack_state({"t": tensor})[0]["t"], pack_state({"t": tensor}, copy=True)[0]["t"]
    tensor += 1
    assert (live.tolist(), kept.tolist()) == ([1, 1], [0, 0])


class Level(IntEnum):
    LOW = 1


class Settings(dict[str, Any]):
    """A subclass would come back as a dict."""


Pair = namedtuple("Pair", "a b")
cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "scheduler/inner/0 is a builtins.object"),
        (len, "builtin_function"),
        (slice(1), "builtins.slice"),
        (Pair(1, 2), "Pair"),
        (Level.LOW, "Level"),
        (Settings(a=1), "Settings"),
        (defaultdict(lambda: 3), "makes its entries by <function"),
        (Counter({Level.LOW: 1}), r"the key <Level.LOW: 1>"),
        ({(Level.LOW,): 3}, "Level"),
        (np.array(["text"]), "numpy <U4"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta tensor"),
        (cycle, "contains itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as refused:
        pack_state({"scheduler": {"inner": [value]}})
    assert "scheduler/inner" in str(refused.value)


@pytest.mark.parametrize(
    "scalars",
    [
        *(None, 3, [], {"tuple": []}, {"dict": 3}, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"exec": "x"}, {}),
        *({"dict": [], "tuple": []}, {"tensor": "gone"}, {"tensor": []}, {"float": "1e5"}, {"module": [[]]}),
        *({"size": ["x"]}, {"module": [[], 3]}, {"counter": 3}, {"set": [[]]}, {"deque": 3}, {"complex": [1]}),
        *({"bytes": "x"}, {"dtype": "nn"}, {"device": "nowhere"}, {"defaultdict": ["exec", []]}, {"ordered": [[1]]}),
    ],
)
def test_malformed_scalars_are_refused(scalars: Any) -> None:
    with pytest.raises(CheckpointError):
        unpack_state({}, scalars)
    with pytest.raises(CheckpointError):
        unpack_state({}, {"dict": [["a", {"exec": scalars}]]})
