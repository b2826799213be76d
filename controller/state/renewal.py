"""Renewing the leader's lease from a thread of its own: a busy event loop must not cost the leadership.

The thread says "this process leads on" only for as long as the event loop, which does the leading, answers: one that
stands still is no leader, however well its thread can reach etcd.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from atoll.errors import AtollError, NotFound

logger = logging.getLogger(__name__)

STILL_S: Final = 15.0
"""An event loop that did not turn once for this long leads no more; another controller may, a lease later."""
_RETRY_S: Final = 0.2
_JOIN_S: Final = 5.0


class LeaseRenewal:
    """Renews one lease at a third of its time. Made inside the event loop; the owner stops it.

    refresh: starts the lease's time again, given how long it may block at most, in seconds."""

    def __init__(
        self,
        refresh: Callable[[int, float], float],
        lease: int,
        ttl_s: float,
        renewed_s: float,
        still_s: float = STILL_S,
    ) -> None:
        """renewed_s: when the lease's time began, on the monotonic clock; never later than etcd counts."""
        self._refresh, self._lease, self._ttl_s, self._still_s = refresh, lease, ttl_s, still_s
        self._loop = asyncio.get_running_loop()
        self._turned_s = time.monotonic()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(renewed_s,), name="lease-renewal", daemon=True)
        self._thread.start()

    async def ended(self) -> str:
        """Wait until the lease is renewed no more. Returns why."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Renew no more. May be called twice."""
        self._stop.set()
        await asyncio.wait({self._ended}, timeout=_JOIN_S)
        self._thread.join(timeout=_JOIN_S)

    def _run(self, renewed_s: float) -> None:
        reason = self._renew(renewed_s)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ended.set_result, reason)

    def _renew(self, renewed_s: float) -> str:
        wait_until_s = renewed_s + self._ttl_s / 3
        while not self._stop.wait(max(0.0, wait_until_s - time.monotonic())):
            asked_s = time.monotonic()
            left_s = renewed_s + self._ttl_s - asked_s
            if left_s <= 0:
                return f"its lease could not be renewed for {self._ttl_s:g} s"
            if asked_s - self._turned_s > self._still_s:
                return f"this controller's event loop stood still for {self._still_s:g} s"
            try:
                self._loop.call_soon_threadsafe(self._turned)
                self._refresh(self._lease, left_s)
            except NotFound as error:
                return str(error)
            except AtollError as error:
                logger.warning(
                    "%s; this controller leads for %.1f s more", error, renewed_s + self._ttl_s - time.monotonic()
                )
                wait_until_s = time.monotonic() + min(_RETRY_S, self._ttl_s / 10)
            except RuntimeError:
                return "its event loop is closed"
            else:
                renewed_s = asked_s  # counted from before the question: never later than etcd counts
                wait_until_s = renewed_s + self._ttl_s / 3
        return "it resigned"

    def _turned(self) -> None:
        self._turned_s = time.monotonic()
