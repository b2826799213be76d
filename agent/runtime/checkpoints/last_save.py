"""The last checkpoint: all ranks stay until it is on disk, and in the object store where there is one.

A rank that ended before would be missed: should the one that writes die meanwhile, any other still has the state that
training ended with, and writes it; and a run whose ranks end apart is stopped."""

from __future__ import annotations

import math
import time
from typing import Final

from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING

PROGRESS_INTERVAL_S: Final = 2.0
"""Seconds between two exchanges of progress among ranks; a dead peer is noticed then."""
MAX_UPLOAD_S: Final = 600.0
"""Seconds that an upload may take once the disk has everything."""
MAX_STALL_S: Final = 600.0
"""Seconds without a byte after which a disk is not waited for any more."""


def save_last(session: Session, saver: Saver) -> None:
    """Collective: write the last boundary's checkpoint, and return when that of every rank is done, or given up aloud.
    Raises PeerLost, CheckpointError where a state dict holds what no checkpoint can."""
    writes = _LastSave(session, saver)
    saver.begin_last()
    told = False
    while True:
        row = (int(writes.over_within(PROGRESS_INTERVAL_S)), progress.own_bytes)
        rows = gathered_rows(session.group, row)
        progress.peer_bytes = sum(saved for _, saved in rows) - row[1]
        if all(over for over, _ in rows):
            return
        if not told and session.place.is_main:
            told = True
            session.notice(LEVEL_INFO, "training has ended; all ranks wait until the last checkpoint is saved")


class _LastSave:
    """Progress of this rank's part: first the disk, then the object store."""

    def __init__(self, session: Session, saver: Saver) -> None:
        self._session, self._saver = session, saver
        self._moved_s, self._bytes = time.monotonic(), progress.own_bytes
        self._upload_ends_s = math.inf

    def over_within(self, wait_s: float) -> bool:
        """Wait, and return whether this rank has nothing more to write or gives up."""
        return self._written(wait_s) and self._uploaded(wait_s)

    def _written(self, wait_s: float) -> bool:
        if self._saver.last_written_within(wait_s):
            self._upload_ends_s = min(self._upload_ends_s, time.monotonic() + MAX_UPLOAD_S)
            return True
        now_s = time.monotonic()
        if progress.own_bytes != self._bytes:
            self._moved_s, self._bytes = now_s, progress.own_bytes
        if now_s - self._moved_s <= MAX_STALL_S:
            return False
        self._saver.leave_behind(f"its disk took no byte for {MAX_STALL_S:.0f} s")
        return True

    def _uploaded(self, wait_s: float) -> bool:
        if self._saver.uploaded_within(wait_s):
            return True
        if time.monotonic() <= self._upload_ends_s:
            return False
        text = f"the last checkpoint was not uploaded within {MAX_UPLOAD_S:.0f} s; it is on disk"
        self._session.notice(LEVEL_WARNING, text)
        self._saver.upload_no_more()
        return True
