"""Stream captured output to the controller, from the last acknowledged byte, one message in flight for each worker."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.agent.supervisor.worker_logs.output import dropped_line
from atoll.agent.supervisor.worker_logs.spool import Spool, prune
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.agents_pb2 import LogAck, LogBatch

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 128 * 1024  # heartbeats queue behind it: half of what is allowed, for thin links
RESEND_S: Final = 5.0
MAX_STREAMS: Final = 192  # two open files each
KEEP_FILES: Final = 512


class LogStream:
    """One worker's output as the controller sees it: bytes without gaps; a line replaces lost ones.

    `acked` counts bytes of that stream; `_position` bytes of the spool, which may be further on."""

    def __init__(self, key: WorkerKey, spool: Spool) -> None:
        self.key = key
        self.spool = spool
        self.acked = 0
        self.ended = False
        self._outstanding = b""
        self._sent_at_s: float | None = None
        self._position = 0

    def hold(self, output: bytes) -> None:
        """Set the whole output of a worker that was no process. Raises OSError."""
        self.spool.append(output)
        self.ended = True

    @property
    def is_fully_sent(self) -> bool:
        """Return True if the controller has acknowledged all output so far."""
        return not self._outstanding and self._position >= self.spool.end

    def next_batch(self, now_s: float) -> LogBatch | None:
        """Return the batch to send now, or None."""
        if not self._outstanding:
            lost, data = self.spool.read(self._position, BATCH_BYTES)
            self._position += lost + len(data)
            self._outstanding = (dropped_line(lost) if lost else b"") + data
        elif self._sent_at_s is not None and now_s - self._sent_at_s < RESEND_S:
            return None
        if not self._outstanding:
            return None
        self._sent_at_s = now_s
        return LogBatch(id=self.key.to_wire(), offset=self.acked, data=self._outstanding)

    def ack(self, offset: int) -> None:
        """Record that the controller keeps all bytes before `offset`. Unsent bytes cannot be acknowledged."""
        count = min(offset - self.acked, len(self._outstanding))
        if count > 0:
            self.acked += count
            self._outstanding = self._outstanding[count:]
            self._sent_at_s = None

    def rewind(self) -> None:
        """Send unacknowledged output again: the connection is new."""
        self._sent_at_s = None


class Logs:
    """Output streams of all workers, at state_dir/logs/JOB/run-N-rank-R.log. On the event loop."""

    def __init__(self, folder: Path, on_data: Callable[[], None]) -> None:
        """Raises OSError."""
        self._folder = folder
        self._on_data = on_data
        self._streams: dict[WorkerKey, LogStream] = {}
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder, KEEP_FILES)

    def open(self, key: WorkerKey) -> LogStream:
        """Open a new log for a worker that starts. Raises OSError."""
        path = self.path(key)
        self._drop_surplus()
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = self._streams[key] = LogStream(key, Spool(path))
        return stream

    def path(self, key: WorkerKey) -> Path:
        return self._folder / key.job / f"run-{key.run}-rank-{key.rank}.log"

    def next_batch(self) -> LogBatch | None:
        """Return the next message for the controller; workers take turns."""
        now_s = time.monotonic()
        for key in list(self._streams):
            batch = self._streams[key].next_batch(now_s)
            if batch is not None:
                self._streams[key] = self._streams.pop(key)  # to the end of the queue
                return batch
            if self._streams[key].ended and self._streams[key].is_fully_sent:
                self._streams.pop(key).spool.close()
        return None

    @property
    def all_sent(self) -> bool:
        return all(stream.is_fully_sent for stream in self._streams.values())

    def ack(self, message: LogAck) -> None:
        stream = self._streams.get(WorkerKey.of(message.id))
        if stream is not None:
            stream.ack(message.offset)
            self._on_data()

    def rewind(self) -> None:
        for stream in self._streams.values():
            stream.rewind()

    def remove(self, job: str) -> None:
        """Remove all output of a finished job, sent or not."""
        for key in [key for key in self._streams if key.job == job]:
            self._streams.pop(key).spool.close()
        shutil.rmtree(self._folder / job, ignore_errors=True)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.spool.close()
        self._streams.clear()

    def _drop_surplus(self) -> None:
        """Close the oldest logs beyond MAX_STREAMS, so that an absence of the controller for days does not exhaust open
        files."""
        ended = [key for key, stream in self._streams.items() if stream.ended]
        for key in ended[: max(0, len(self._streams) + 1 - MAX_STREAMS)]:
            logger.warning("the output of %s never reached a controller whole; it is in %s", key, self.path(key))
            self._streams.pop(key).spool.close()
        prune(self._folder, KEEP_FILES, [self.path(key) for key in self._streams])
