"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "info", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `next_step` is empty where nothing is to be done."""

    subject: str
    verdict: Severity
    found: str
    next_step: str = ""
