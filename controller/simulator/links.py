"""Links over simulated time: a constant rate, or a trace of `seconds,mbit_s` lines over and over."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import BadInput

MAX_POINTS: Final = 100_000
BYTES_PER_MBIT: Final = 125_000.0


@dataclass(frozen=True, slots=True)
class Link:
    """Rate over time: mbit_s[i] from starts_s[i] on, each way; after length_s it begins again."""

    starts_s: tuple[float, ...]
    mbit_s: tuple[float, ...]
    length_s: float

    @classmethod
    def constant(cls, mbit_s: float) -> Link:
        return cls((0.0,), (mbit_s,), math.inf)

    def at_mbit_s(self, now_s: float) -> float:
        return self.mbit_s[bisect_right(self.starts_s, self._inside(now_s)[1]) - 1]

    def ends_s(self, begin_s: float, size_bytes: float) -> float:
        """Return when this many bytes are through, if they begin at `begin_s` and are alone on the link."""
        round_s, inside_s = self._inside(begin_s)
        index = bisect_right(self.starts_s, inside_s) - 1
        left = size_bytes
        while True:
            until_s = self.starts_s[index + 1] if index + 1 < len(self.starts_s) else self.length_s
            bytes_s = self.mbit_s[index] * BYTES_PER_MBIT
            if left <= (until_s - inside_s) * bytes_s:
                return round_s + inside_s + left / bytes_s
            left -= (until_s - inside_s) * bytes_s
            inside_s, index = until_s, index + 1
            if index == len(self.starts_s):
                round_s, inside_s, index = round_s + self.length_s, 0.0, 0

    def _inside(self, now_s: float) -> tuple[float, float]:
        """Return when the present round of the trace began, and the seconds since then."""
        if math.isinf(self.length_s):
            return 0.0, now_s
        rounds, inside_s = divmod(now_s, self.length_s)
        return rounds * self.length_s, inside_s


def read_trace(path: Path, hint: str = ". Its path is relative to the scenario") -> Link:
    """Read a CSV of `seconds,mbit_s` with a heading; seconds ascend from 0. The last point lasts like the one before.

    Raises BadInput naming file and line. hint: added to the message where there is no such file."""
    try:
        rows = list(csv.reader(path.read_text().splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the trace {path} cannot be read: {error}{hint}") from error
    if not 3 <= len(rows) <= MAX_POINTS or rows[0] != ["seconds", "mbit_s"]:
        raise BadInput(f"the trace {path} must be a line `seconds,mbit_s` and 2 to {MAX_POINTS - 1} points after it")
    starts: list[float] = []
    rates: list[float] = []
    for number, row in enumerate(rows[1:], start=2):
        try:
            second, rate = map(float, row)
        except ValueError:
            second = rate = math.nan
        if not (second > starts[-1] if starts else second == 0) or not 1 <= rate <= 100_000 or math.isinf(second):
            raise BadInput(
                f"{path}, line {number}: {','.join(row)!r} is not a time that ascends from 0 and 1 to 100000 Mbit/s"
            )
        starts.append(second)
        rates.append(rate)
    return Link(tuple(starts), tuple(rates), 2 * starts[-1] - starts[-2])
