"""State dicts to tensors and plain JSON, and back.

JSON has no tuples, no keys but strings, no infinity: what is not itself in JSON becomes an object with one tagged
member, {"tuple": [...]}, {"dict": [[key, value], ...]}, {"tensor": name} and so on. No object stands for itself, so
tags cannot be confused with data. Nothing here can name code to run."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from atoll.errors import CheckpointError

MAX_DEPTH: Final = 64
Tensors = dict[str, torch.Tensor]


def pack_state(state: Mapping[str, Any], *, copy: bool = False) -> tuple[Tensors, Any]:
    """State dicts by name -> (tensors by name, JSON-able rest).

    Holds None, bool, int, float (inf and nan too), complex, str, bytes, list, tuple, dict, set, frozenset, deque,
    OrderedDict, Counter, defaultdict of builtin types, torch.Size, dtypes, devices, tensors, numpy scalars and arrays,
    in any nesting; each comes back as its own type, subclasses are refused. Tied tensors are kept once and come back
    tied. copy: own CPU memory for every tensor, for who writes while training goes on; without it CPU tensors are
    the live ones. Raises CheckpointError naming the key of anything else."""
    packer = _Packer(copy)
    return packer.tensors, packer.encode(dict(state), ())


def unpack_state(tensors: Mapping[str, torch.Tensor], scalars: Any) -> dict[str, Any]:
    """Return the state that `pack_state` was given. Raises CheckpointError where the two do not belong together."""
    try:
        state = _decode(scalars, tensors, 0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the state in the checkpoint is malformed: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the state in the checkpoint is a {type(state).__name__}, not a dict")
    return state


def merged(packed: Sequence[Any]) -> Any:
    """The rest of several parts of a state, as `pack_state` gave each: dicts have the keys of all, in the order of the
    parts; what else two parts both have is the first one's. Raises CheckpointError where they do not fit together."""
    first = packed[0]
    if len(packed) == 1 or not all(isinstance(one, dict) for one in packed):
        return first
    tags = {tag for one in packed for tag in one}
    if tags in ({"dict"}, {"ordered"}):
        (tag,) = tags
        return {tag: _merged_pairs([one[tag] for one in packed])}
    if tags == {"module"}:
        pairs, metadata = zip(*(one["module"] for one in packed), strict=True)
        return {"module": [_merged_pairs(pairs), merged(metadata)]}
    if len(tags) != 1:
        raise CheckpointError(f"parts of a state do not fit together: {sorted(tags)[:4]} stand in one place")
    return first


def _merged_pairs(parts: Sequence[Any]) -> list[Any]:
    found: dict[str, tuple[Any, list[Any]]] = {}
    for part in parts:
        for key, value in part:
            found.setdefault(repr(key), (key, []))[1].append(value)
    return [[key, merged(values)] for key, values in found.values()]


class _Packer:
    def __init__(self, copy: bool) -> None:
        self.tensors: Tensors = {}
        self._copy = copy
        self._names: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # as long as they live, no other tensor has their memory

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"{_words(path[:4])} ... is nested more than {MAX_DEPTH} deep, or contains itself")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if type(value) is list:
            return self._items(value, path)
        if type(value) in _MAPPINGS:
            return self._dict(value, path)
        if (tag := _TAGS.get(type(value))) is not None:
            return {tag: self._tagged(value, path)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, path)
        raise CheckpointError(
            f"{_words(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold. "
            "Put plain numbers, strings, lists, dicts or tensors into the state_dict, or leave it out"
        )

    def _tagged(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, (bytes, bytearray)):
            return base64.b64encode(value).decode()
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value).removeprefix("torch.")
        if isinstance(value, complex):
            return [self.encode(value.real, path), self.encode(value.imag, path)]
        items = self._items(value, path)
        if isinstance(value, (set, frozenset)):
            items.sort(key=json.dumps)  # every rank writes the same
        return [value.maxlen, items] if isinstance(value, deque) else items

    def _items(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(index))) for index, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> dict[str, Any]:
        for key in value:
            if type(key) not in _KEYS:
                raise CheckpointError(
                    f"{_words(path)} has the key {key!r} of type {type(key).__name__}; use strings or numbers as keys"
                )
        pairs = [[self.encode(key, path), self.encode(item, (*path, str(key)))] for key, item in value.items()]
        metadata = getattr(value, "_metadata", None)  # versions of a module's layout, which load_state_dict reads
        if metadata is None:
            if type(value) is not defaultdict:
                return {_MAPPINGS[type(value)]: pairs}
            factory = next((name for name, one in _FACTORIES.items() if one is value.default_factory), None)
            if factory is None:
                raise CheckpointError(
                    f"{_words(path)} is a defaultdict that makes its entries by {value.default_factory!r}, which a "
                    f"checkpoint cannot hold. Use one of {', '.join(_FACTORIES)}, or a dict"
                )
            return {"defaultdict": [factory, pairs]}
        return {"module": [pairs, self.encode(dict(metadata), (*path, "_metadata"))]}

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CheckpointError(
                f"{_words(path)} is a {type(tensor).__name__}, a special kind of tensor. Convert it to a plain one"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise CheckpointError(f"{_words(path)} is a {kind} tensor; only dense ones can be kept")
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in self._names:
            return self._names[same]
        name = self._free_name(_words(path))
        plain = tensor.detach()
        self.tensors[name] = plain.to("cpu", copy=True).contiguous() if self._copy else plain
        self._names[same] = name
        self._alive.append(plain)
        return name

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, path: tuple[str, ...]) -> dict[str, Any]:
        array = np.array(value, order="C", copy=True)  # own memory: it may be read-only, or of the other byte order
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        try:
            tensor = torch.from_numpy(array)
        except TypeError as error:
            raise CheckpointError(
                f"{_words(path)} is a numpy {array.dtype} value; only numbers and booleans can be kept. Convert it"
            ) from error
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {f"numpy-{kind}": self._tensor(tensor, path)}

    def _free_name(self, wanted: str) -> str:
        name, suffix = wanted, 2
        while name in self.tensors or name == "__metadata__":  # the latter is taken by the file format
            name, suffix = f"{wanted}~{suffix}", suffix + 1
        return name


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * MAX_DEPTH + 2:
        raise CheckpointError("the state in the checkpoint is nested too deep")
    if isinstance(value, list):
        return [_decode(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in ("tensor", "numpy-array", "numpy-number"):
        if content not in tensors:
            raise CheckpointError(
                f"the state in the checkpoint speaks of tensor {content!r}, which its file does not hold"
            )
        tensor = tensors[content]
        return tensor if tag == "tensor" else tensor.numpy() if tag == "numpy-array" else tensor.numpy()[()]
    if tag == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
    if tag == "module":
        pairs, metadata = content
        state: OrderedDict[Any, Any] = OrderedDict(_pairs(pairs, tensors, depth))
        state._metadata = OrderedDict(_decode(metadata, tensors, depth + 1))  # type: ignore[attr-defined]
        return state
    if tag == "defaultdict":
        return defaultdict(_FACTORIES[content[0]], _pairs(content[1], tensors, depth))
    if tag in _PAIRED:
        return _PAIRED[tag](_pairs(content, tensors, depth))
    return _CONTAINERS[tag](_decode(content, tensors, depth + 1))


def _size(items: Any) -> torch.Size:
    if not all(type(item) is int and 0 <= item < 2**63 for item in items):
        raise ValueError("no shape of a tensor")  # torch takes it, and fails when it is looked at
    return torch.Size(items)


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"the dtype {name!r}")
    return found


_MAPPINGS: Final[Mapping[type, str]] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
}
_PAIRED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_FACTORIES: Final[Mapping[str, Callable[[], Any] | None]] = {
    "None": None,
    **{one.__name__: one for one in (int, float, bool, str, list, dict, set, tuple)},
}
_KEYS: Final = frozenset({type(None), str, int, bool, float, complex, bytes, tuple, frozenset})
_TAGS: Final[Mapping[type, str]] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
    complex: "complex",
    bytes: "bytes",
    bytearray: "bytearray",
    torch.dtype: "dtype",
    torch.device: "device",
}
_CONTAINERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "size": _size,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda content: deque(content[1], content[0]),
    "complex": lambda content: complex(*content),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "dtype": _dtype,
    "device": torch.device,
}


def _pairs(pairs: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors, depth + 1), _decode(item, tensors, depth + 1)) for key, item in pairs]


def _words(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the state"
