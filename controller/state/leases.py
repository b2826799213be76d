"""Keeping many leases alive over one stream: the leader renews a node's lease as long as the node is heard of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from atoll.controller.state.endpoints import HAS_LEADER, Endpoints, EtcdMember
from atoll.controller.state.etcd import EtcdStore
from atoll.errors import StoreUnavailable
from atoll.v1 import etcd_pb2 as wire

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 2.0


@dataclass(slots=True)
class _Kept:
    ttl_s: float
    refreshed_s: float
    """When the last refresh was asked for, on the keeper's clock."""


class LeaseKeeper:
    """Refreshes leases when they are touched, each at most once in a third of its time.

    A lease that nobody touches runs out at etcd, which deletes its keys. `on_expired` is called, on the event loop,
    with a lease that was touched too late; it is no longer kept then. The owner runs `run()` as a task and cancels it.
    """

    def __init__(
        self, store: EtcdStore, on_expired: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._endpoints: Final[Endpoints] = store.endpoints
        self._on_expired = on_expired
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self._due: dict[int, None] = {}  # a set that keeps its order; bounded by the leases kept
        self._asked: dict[int, None] = {}  # sent over this stream, not answered yet
        self._wake = asyncio.Event()

    def keep(self, lease: int, ttl_s: float) -> None:
        """Begin with a lease that was granted just now."""
        self._kept[lease] = _Kept(ttl_s, self._clock())

    def touch(self, lease: int) -> None:
        """Refresh the lease soon, as its owner is alive; not one that is not kept, or was refreshed lately."""
        kept = self._kept.get(lease)
        now_s = self._clock()
        if kept is None or now_s - kept.refreshed_s < kept.ttl_s / 3:
            return
        kept.refreshed_s = now_s
        self._due[lease] = None
        self._wake.set()

    def forget(self, lease: int) -> None:
        """Stop keeping a lease: it was revoked, or its key is gone."""
        self._kept.pop(lease, None)
        self._due.pop(lease, None)
        self._asked.pop(lease, None)

    def __len__(self) -> int:
        return len(self._kept)

    async def run(self) -> None:
        """Serve touches until cancelled or the store is closed. What could not be sent is sent after reconnecting."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._endpoints.closed:
            member = self._endpoints.preferred()
            began_s = self._clock()
            try:
                await self._serve(member)
            except StoreUnavailable as error:
                if self._endpoints.closed:
                    return
                self._endpoints.avoid(member)
                if self._clock() - began_s > _ANSWER_S:
                    backoff_s = _FIRST_BACKOFF_S
                logger.warning("%s; connecting again in %.1f s (%d leases kept)", error, backoff_s, len(self._kept))
                await self._endpoints.pause(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _serve(self, member: EtcdMember) -> None:
        """Ask and listen over one stream, until it is lost."""
        self._due = {**self._asked, **self._due}  # what the last stream left unanswered
        self._asked = {}
        if self._due:
            self._wake.set()
        call = member.lease.LeaseKeepAlive(metadata=HAS_LEADER)
        sides = [
            asyncio.create_task(self._ask(call, member), name="lease-keeper-ask"),
            asyncio.create_task(self._listen(call, member), name="lease-keeper-listen"),
        ]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                side.result()
        finally:
            call.cancel()
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _ask(self, call: Any, member: EtcdMember) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                lease = next(iter(self._due))
                self._asked[lease] = None
                del self._due[lease]
                with self._endpoints.errors("refreshing leases", member):
                    async with asyncio.timeout(_ANSWER_S):
                        await call.write(wire.LeaseKeepAliveRequest(ID=lease))

    async def _listen(self, call: Any, member: EtcdMember) -> None:
        while True:
            with self._endpoints.errors("refreshing leases", member):
                reply = await self._next_reply(call)
            if reply is grpc.aio.EOF:
                raise StoreUnavailable(f"refreshing leases: etcd at {member.address} ended the stream")
            self._asked.pop(reply.ID, None)
            if reply.TTL <= 0 and reply.ID in self._kept:
                self.forget(reply.ID)
                self._on_expired(reply.ID)

    async def _next_reply(self, call: Any) -> Any:
        """Raises TimeoutError where requests stay without any reply."""
        read = asyncio.ensure_future(call.read())
        try:
            while True:
                waiting_before = bool(self._asked)
                done, _ = await asyncio.wait({read}, timeout=_ANSWER_S)
                if done:
                    return await read
                if waiting_before:
                    raise TimeoutError
        finally:
            if not read.done():
                call.cancel()
            await asyncio.gather(read, return_exceptions=True)
