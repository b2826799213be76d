"""Reads what the sentences of a job's events tell of durations. Pure; what it does not know is None.

The controller words them: controller/jobs/membership/view_words.py, controller/jobs/lifecycle/recovery.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_PARTS: Final = r"(?P<parts>-?[\d.]+ [a-z][a-z ]*(?:, -?[\d.]+ [a-z][a-z ]*)*)"
_CHANGED: Final = re.compile(
    rf"view (?P<view>\d+): .+? (?P<how>went on in place after|paused for) (?P<total>[\d.]+) s from step \d+: {_PARTS}"
)
_RECOVERED: Final = re.compile(rf"(?P<how>recovered|resized) in (?P<total>-?[\d.]+) s: {_PARTS};")
_FIRST_STEP: Final = re.compile(r"view \d+: .+? first step [\d.]+ s after the launch")
_NAMES: Final = {
    "went on in place after": "change in place",
    "paused for": "change at a boundary",
    "recovered": "recovery",
    "resized": "resize",
}


@dataclass(frozen=True, slots=True)
class RecordedPause:
    """What held training up, as an event tells at its end. parts: one after the other, in seconds. view: 0 of a new
    run."""

    name: str
    total_s: float
    parts: tuple[tuple[str, float], ...]
    view: int


def pause_in(text: str) -> RecordedPause | None:
    """A change of members, or a recovery, that the sentence tells of."""
    if (found := _CHANGED.match(text) or _RECOVERED.match(text)) is None:
        return None
    told = (part.partition(" ") for part in found["parts"].split(", "))
    parts = tuple((name, max(float(seconds), 0.0)) for seconds, _, name in told)
    view = int(found.groupdict().get("view") or 0)
    return RecordedPause(_NAMES[found["how"]], max(float(found["total"]), 0.0), parts, view)


def is_first_step(text: str) -> bool:
    """Whether it tells that all workers of a run have completed a step."""
    return _FIRST_STEP.match(text) is not None
