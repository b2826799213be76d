"""The place up to which a subscription has delivered a job's output, over streams that break."""

from __future__ import annotations

from atoll.v1 import jobs_pb2 as pb


class LogPosition:
    """How far each worker's output was delivered, so that a stream that starts over repeats nothing."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._in_this_stream: dict[tuple[int, int], int] = {}
        self._first_run = 0

    @property
    def anything(self) -> bool:
        return bool(self._next)

    def new_stream(self) -> None:
        self._in_this_stream = {}
        self._first_run = min((run for run, _ in self._next), default=0)

    def only_new(self, chunk: pb.LogChunk) -> pb.LogChunk | None:
        """The part of the chunk that was not delivered yet; None if all was."""
        key = (chunk.run, chunk.rank)
        if chunk.run < self._first_run:
            return None
        start = chunk.offset if chunk.HasField("offset") else self._in_this_stream.get(key, 0)
        end = start + len(chunk.data)
        self._in_this_stream[key] = end
        had = self._next.get(key, start)
        if end <= had:
            return None
        self._next[key] = end
        if start >= had:
            return chunk
        return pb.LogChunk(run=chunk.run, rank=chunk.rank, data=chunk.data[had - start :], offset=had)
