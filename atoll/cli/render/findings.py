"""The findings of `atoll doctor`: one line each, with the next step if something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from atoll.cli.render import terminal

Severity = Literal["ok", "info", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `next_step` is empty where nothing is to be done."""

    subject: str
    verdict: Severity
    found: str
    next_step: str = ""


def show(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings on stdout: a table, or a JSON document."""
    broken = sum(finding.verdict == "broken" for finding in findings)
    if as_json:
        terminal.print_json({"healthy": not broken, "findings": [asdict(finding) for finding in findings]})
        return
    rows = [(finding.subject, finding.verdict, finding.found) for finding in findings]
    terminal.print_table(("CHECK", "VERDICT", "WHAT"), rows)
    sys.stdout.flush()
    steps = [finding for finding in findings if finding.next_step]
    if steps:
        terminal.note("\nnext:")
    for finding in steps:
        terminal.note(f"  {finding.subject}: {finding.next_step}")
