"""Watching a prefix without ever losing an event.

After a lost connection the watch resumes behind the last event that was delivered. Never behind `header.revision`:
while a watcher catches up, etcd sends at most 1,000 revisions at a time under a header that names the newest one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import grpc.aio

from atoll.controller.state.endpoints import HAS_LEADER, Endpoints, EtcdMember
from atoll.controller.state.store import Deleted, Entry, WatchBatch
from atoll.errors import BadInput, StoreUnavailable
from atoll.v1 import etcd_pb2 as wire

logger = logging.getLogger(__name__)

_IDLE_S: Final = 5.0  # without a word for this long, etcd is asked for one
_ANSWER_S: Final = 5.0  # and without an answer for this long, the connection is dead
_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 2.0


async def watch(endpoints: Endpoints, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
    """See StateStore.watch. Raises NotAllowed where etcd refuses this identity."""
    resume_at = from_revision
    backoff_s = _FIRST_BACKOFF_S
    while not endpoints.closed:
        member = endpoints.preferred()
        try:
            async with aclosing(_one_stream(endpoints, member, prefix, resume_at)) as batches:
                async for batch in batches:
                    resume_at = batch.revision if batch.reset else batch.revision + 1
                    backoff_s = _FIRST_BACKOFF_S
                    yield batch
        except StoreUnavailable as error:
            if endpoints.closed:
                return
            endpoints.avoid(member)
            logger.warning("%s; connecting again in %.1f s, from revision %d", error, backoff_s, resume_at)
            await endpoints.pause(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)


async def _one_stream(
    endpoints: Endpoints, member: EtcdMember, prefix: str, start_revision: int
) -> AsyncGenerator[WatchBatch, None]:
    """Batches from one connection. Ends after a reset, raises StoreUnavailable when the connection is lost."""
    doing = f"watching {prefix}"
    create = wire.WatchCreateRequest(
        key=prefix.encode(),
        range_end=prefix_end(prefix),
        start_revision=start_revision,
        progress_notify=True,
        fragment=True,
    )
    call = member.watch.Watch(metadata=HAS_LEADER)
    unfinished: list[Entry | Deleted] = []
    try:
        with endpoints.errors(doing, member):
            async with asyncio.timeout(_ANSWER_S):
                await call.write(wire.WatchRequest(create_request=create))
        while True:
            with endpoints.errors(doing, member):
                response = await _next_response(call)
            if response is grpc.aio.EOF:
                raise StoreUnavailable(f"{doing}: etcd at {member.address} ended the stream")
            if response.compact_revision:
                logger.warning("%s: history before revision %d was compacted", doing, response.compact_revision)
                yield WatchBatch(response.compact_revision, (), reset=True)
                return
            # One of several members may be behind the others, and catches up.
            if endpoints.single and response.created and response.header.revision < start_revision - 1:
                logger.warning(
                    "%s: etcd is at revision %d, before %d; it was restored from a copy, or lost its last writes",
                    doing, response.header.revision, start_revision - 1,
                )  # fmt: skip
                yield WatchBatch(max(response.header.revision, 1), (), reset=True)
                return
            if response.canceled:
                raise StoreUnavailable(f"{doing}: etcd at {member.address} cancelled it: {response.cancel_reason}")
            unfinished += [_event_of(event) for event in response.events]
            if unfinished and not response.fragment:  # a revision may be split over fragments; only whole ones go out
                yield WatchBatch(unfinished[-1].mod_revision, tuple(unfinished))
                unfinished = []
    finally:
        call.cancel()


async def _next_response(call: Any) -> Any:
    """The stream's next message. Raises TimeoutError when etcd does not even answer a request for progress."""
    # A read that is cancelled takes the whole stream with it, so the patience is here and not in a timeout around it.
    are_you_there = wire.WatchRequest()
    are_you_there.progress_request.SetInParent()
    read = asyncio.ensure_future(call.read())
    try:
        done, _ = await asyncio.wait({read}, timeout=_IDLE_S)
        if not done:
            async with asyncio.timeout(_ANSWER_S):
                await call.write(are_you_there)
                await asyncio.wait({read})
        return await read
    finally:
        if not read.done():
            call.cancel()
        await asyncio.gather(read, return_exceptions=True)


def entry_of(kv: Any) -> Entry:
    """An mvccpb.KeyValue as an Entry."""
    return Entry(kv.key.decode(errors="replace"), kv.value, kv.mod_revision, kv.create_revision, kv.lease)


def _event_of(event: Any) -> Entry | Deleted:
    if event.type == event.DELETE:
        return Deleted(event.kv.key.decode(errors="replace"), event.kv.mod_revision)
    return entry_of(event.kv)


def prefix_end(prefix: str) -> bytes:
    """The first key behind all that begin with `prefix`. Raises BadInput for an empty one."""
    if not prefix:
        raise BadInput("an empty prefix would reach every key of etcd. Name one that begins with /atoll/")
    encoded = prefix.encode()  # UTF-8 has no byte 0xFF, so the last one can always be raised
    return encoded[:-1] + bytes([encoded[-1] + 1])
