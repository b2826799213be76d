"""One controller leads: whoever created the leader key, for as long as its lease is renewed.

The key alone protects nothing: a leader that was paused does not know that its lease ran out. So every write carries
`Leadership.fence`, and etcd refuses it when the key is not the one that this leader created.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from atoll.controller.state.renewal import LeaseRenewal
from atoll.controller.state.store import Deleted, Entry, Fence, Put, StateStore, Unchanged
from atoll.errors import Conflict, NotFound, StoreUnavailable

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.2


class Leadership:
    """A won campaign. The winner calls `resign` in the end, also after losing the leadership."""

    def __init__(self, store: StateStore, fence: Fence, lease: int, ttl_s: int, renewed_s: float) -> None:
        self.fence: Final = fence
        self.lost: Final = asyncio.Event()
        """Set once this controller no longer leads; it must stop acting then."""
        self._store = store
        self._lease = lease
        self._ttl_s = ttl_s
        self._renewal = LeaseRenewal(store.refresh_lease, lease, ttl_s, renewed_s)
        self._task = asyncio.create_task(self._hold(), name="leadership")

    async def resign(self) -> None:
        """Stop leading and let another lead at once. May be called twice."""
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._renewal.stop()
        try:
            await self._store.revoke_lease(self._lease)
        except StoreUnavailable as error:
            logger.warning("%s; another controller can lead in at most %d s", error, self._ttl_s)

    async def _hold(self) -> None:
        """Watch until the lease is no longer renewed, or the key is gone."""
        renewing = asyncio.create_task(self._renewal.ended(), name="leadership-renewal")
        watching = asyncio.create_task(until_gone(self._store, self.fence), name="leadership-watch")
        try:
            done, _ = await asyncio.wait({renewing, watching}, return_when=asyncio.FIRST_COMPLETED)
            first = done.pop()
            gone = f"the key {self.fence.key} of revision {self.fence.create_revision} is gone"
            logger.warning("leadership lost: %s", first.exception() or first.result() or gone)
        finally:
            self.lost.set()
            renewing.cancel()
            watching.cancel()
            await asyncio.gather(renewing, watching, return_exceptions=True)


class Election:
    """One candidate. `value` tells others who leads and where."""

    def __init__(self, store: StateStore, key: str, value: bytes, ttl_s: int) -> None:
        self._store = store
        self._key = key
        self._value = value
        self._ttl_s = ttl_s

    async def leader(self) -> Entry | None:
        """Return the present leader's key, None if no controller leads."""
        return await self._store.read(self._key)

    async def campaign(self, note: Callable[[Entry | None], None] = lambda leader: None) -> Leadership:
        """Wait until this candidate leads, over outages of etcd too. note: called with each leader's key meanwhile, and
        with None if no leader is known."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                leader = await self.leader()
                note(leader)
                if leader is not None:
                    await until_gone(self._store, Fence(self._key, leader.create_revision))
                    continue
                granted_s = loop.time()
                lease = await self._store.grant_lease(self._ttl_s)
                fence = await self._create_key(lease)
            except StoreUnavailable as error:
                note(None)
                logger.warning("%s; campaigning again in %.1f s", error, _RETRY_S)
                await asyncio.sleep(_RETRY_S)
                continue
            if fence is not None:
                return Leadership(self._store, fence, lease, self._ttl_s, granted_s)

    async def _create_key(self, lease: int) -> Fence | None:
        """Create the leader key; None if another was faster. If cancelled halfway, the lease runs out by itself."""
        try:
            revision = await self._store.commit([Put(self._key, self._value, lease)], [Unchanged(self._key, 0)])
            return Fence(self._key, revision)
        except (Conflict, NotFound) as error:  # NotFound: so slow that the lease ran out before
            logger.debug("%s", error)
        except StoreUnavailable:
            # It may have been written nevertheless: the lease tells whose key it is.
            leader = await read_until_answered(self._store, self._key)
            if leader is not None and leader.lease == lease:
                return Fence(self._key, leader.create_revision)
        await self._store.revoke_lease(lease)  # so that a write which is still on its way comes to nothing
        return None


async def until_gone(store: StateStore, held: Fence) -> None:
    """Return when the key is not the one of `held` any more."""
    while True:
        entry = await read_until_answered(store, held.key)
        if entry is None or entry.create_revision != held.create_revision:
            return
        async with aclosing(store.watch(held.key, entry.mod_revision + 1)) as batches:
            async for batch in batches:
                if any(isinstance(event, Deleted) and event.key == held.key for event in batch.events):
                    return
                if batch.reset:
                    break
            else:
                raise StoreUnavailable(f"watching {held.key}: the store was closed")


async def read_until_answered(store: StateStore, key: str) -> Entry | None:
    while True:
        try:
            return await store.read(key)
        except StoreUnavailable as error:
            logger.debug("%s; reading again in %.1f s", error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)
