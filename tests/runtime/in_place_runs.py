"""Reads what scripts/in_place.py leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

FIRST: Final = (6.0, 4.0, 2.0)
"""The shares of three workers."""
Line = dict[str, Any]


def lines(out: Path, rank: int) -> list[Line]:
    """What this rank wrote of each batch, the last time where it trained one again."""
    by_step = {}
    for text in (out / f"rank-{rank}.jsonl").read_text().splitlines():
        line = json.loads(text)
        by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
