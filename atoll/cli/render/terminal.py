"""Writes for people and scripts: data on stdout, everything else on stderr, plain text wherever nobody watches."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_CONTROL: Final = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)

STYLES: Final = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "stopping": "yellow",
    "done": "bold green",
    "failed": "bold red",
    "cancelled": "magenta",
    "exited": "dim",
    "connected": "green",
    "lost": "bold red",
    "ok": "green",
    "warning": "yellow",
    "broken": "bold red",
    "info": "dim",
    "error": "bold red",
}


def is_watched(stream: TextIO) -> bool:
    """Return True for a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """One line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """An error: one line, whatever the message holds."""
    line = " ".join(message.split())
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), line))
    else:
        note(f"error: {line}")


def innermost(errors: BaseExceptionGroup[_Error]) -> _Error:
    """Return the first cause inside what a task group raised."""
    first = errors.exceptions[0]
    return innermost(first) if isinstance(first, BaseExceptionGroup) else first


def print_json(document: Any) -> None:
    """One JSON document on a line of its own."""
    print(json.dumps(document, ensure_ascii=False, allow_nan=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout. A terminal gets colours and its width; a pipe gets whole, aligned lines.

    columns: their names, with ">" in front of those that are aligned to the right.
    """
    if not sys.stdout.isatty():
        for line in aligned(columns, rows):
            print(line)
        return
    from rich.console import Console

    Console(highlight=False).print(rich_table(columns, rows))


def print_lines(lines: Iterable[str]) -> None:
    """Lines below a table; nothing at all where there is none."""
    for line in lines:
        print(line, flush=True)


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, one_line: bool = False) -> Any:
    """The same as a rich renderable. one_line: each row; the last cell is cut off where it is too wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for at, column in enumerate(columns):
        name = column.removeprefix(">")
        whole = one_line and at < len(columns) - 1
        table.add_column(
            name,
            justify="right" if name != column else "left",
            no_wrap=one_line or name not in WRAPPED,
            overflow="ellipsis" if one_line else "fold",
            vertical="top",
            min_width=max(len(name), *(len(row[at]) for row in rows), 0) if whole else None,
        )
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return table


WRAPPED: Final = frozenset({"REASON", "WHAT", "NEXT", "DEVICES"})


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as lines of text, two spaces between the columns, none at the ends."""
    lines = [[column.removeprefix(">") for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    sides = [">" if column.startswith(">") else "<" for column in columns]
    return ["  ".join(map("{:{}{}}".format, line, sides, widths)).rstrip() for line in lines]


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "\u2026"


def printable(text: str) -> str:
    """Text from elsewhere without what would move the cursor or recolour the terminal."""
    return _CONTROL.sub("", text)


def ago(unix_s: float, now_s: float | None = None) -> str:
    """'3 min', '2 h 5 min': the time since unix_s."""
    return duration((time.time() if now_s is None else now_s) - unix_s)


def duration(seconds: float) -> str:
    """A span of time as people say it."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
