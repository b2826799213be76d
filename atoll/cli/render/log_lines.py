"""Cuts the output of workers, which comes in pieces, into lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2 import LogChunk

_MAX_LINE_BYTES: Final = 64 * 1024


class LogLines:
    """Cuts each worker's bytes into lines; what has no end yet waits, up to 64 KiB of it."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], bytes] = {}

    def of(self, chunk: LogChunk) -> Iterator[tuple[int, int, str]]:
        """(run, rank, line without its end) for every line that this chunk completed."""
        key = (chunk.run, chunk.rank)
        *whole, rest = (self._open.pop(key, b"") + chunk.data).split(b"\n")
        while len(rest) > _MAX_LINE_BYTES:
            whole.append(rest[:_MAX_LINE_BYTES])
            rest = rest[_MAX_LINE_BYTES:]
        if rest:
            self._open[key] = rest
        for line in whole:
            yield *key, line.decode(errors="replace")

    def rest(self) -> Iterator[tuple[int, int, str]]:
        """Yield the output that has no end of line yet."""
        for key in sorted(self._open):
            yield *key, self._open[key].decode(errors="replace")
        self._open = {}
