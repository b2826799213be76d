"""The options of a run of the laboratory: methods with options, link rates, models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from atoll.errors import BadInput

Value: TypeAlias = float | int | bool | str
MODELS: Final = ("mlp", "gpt", "words")  # those of the sets
SPARSE_MODELS: Final = ("words-sparse", "table")  # whose gradients are


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


KINDS: Final[Mapping[Callable[[str], Value], str]] = {
    int: "a whole number", float: "a number", str: "a word", _switch: "true or false"
}  # fmt: skip

# Every method, and the options it takes. Their meaning and their bounds are the method's own.
METHODS: Final[Mapping[str, Mapping[str, Callable[[str], Value]]]] = {
    "local": {},
    "ddp": {},
    "ddp-fp16": {},
    "ddp-powersgd": {"rank": int},
    "dense": {},
    "zen": {"scheme": str},
    "stale-sparse": {
        "sparsity": float,
        "staleness": int,
        "values": str,
        "selection": str,
        "error_feedback": _switch,
        "exchange": str,
        "momentum": str,
        "digest_every": int,
    },
}


@dataclass(frozen=True, slots=True)
class Method:
    """How gradients are combined: `text` as it was asked for, e.g. stale-sparse:sparsity=0.95."""

    text: str
    name: str
    options: Mapping[str, Value]

    @staticmethod
    def parse(text: str) -> Method:
        """NAME or NAME:OPTION=VALUE,OPTION=VALUE. Raises BadInput naming what is wrong."""
        name, _, rest = text.partition(":")
        known = METHODS.get(name)
        if known is None:
            raise BadInput(f"there is no method {name!r}; choose among {', '.join(METHODS)}")
        options: dict[str, Value] = {}
        for pair in filter(None, rest.split(",")):
            key, _, value = pair.partition("=")
            if key not in known:
                takes = ", ".join(known) or "none"
                raise BadInput(f"method {name} has no option {key!r}; it takes: {takes}")
            try:
                options[key] = known[key](value)
            except ValueError as error:
                raise BadInput(f"method {text}: {key} = {value!r} is not {KINDS[known[key]]}") from error
        return Method(text, name, MappingProxyType(options))


@dataclass(frozen=True, slots=True)
class Rate:
    """A link's speed in both directions: fixed, along a trace, or as fast as the machine can."""

    text: str
    mbit_s: float | None  # None: unshaped, or what the trace says
    traced: bool = False

    @staticmethod
    def parse(text: str) -> Rate:
        """`none`, `trace`, or Mbit/s. Raises BadInput."""
        if text in ("none", "trace"):
            return Rate(text, None, traced=text == "trace")
        try:
            mbit_s = float(text)
        except ValueError:
            mbit_s = math.nan
        if not 1 <= mbit_s <= 100_000:
            raise BadInput(f"rate {text!r} is neither none, trace nor Mbit/s between 1 and 100000")
        return Rate(text, mbit_s)

    @property
    def unshaped(self) -> bool:
        return self.mbit_s is None and not self.traced

    def __str__(self) -> str:
        return "unshaped" if self.unshaped else "trace" if self.traced else f"{self.text} Mbit/s"


def split_methods(text: str) -> tuple[Method, ...]:
    """A list of methods separated by commas; the commas between a method's options belong to it."""
    words: list[str] = []
    for word in text.split(","):
        if words and ":" in words[-1] and "=" in word and ":" not in word:
            words[-1] += f",{word}"
        else:
            words.append(word)
    return tuple(Method.parse(word) for word in words)
