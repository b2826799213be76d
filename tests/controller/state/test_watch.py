"""The watch on a real etcd: no event is lost or repeated, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from etcd_server import EtcdServer

from atoll.controller.state import watch as watching
from atoll.controller.state.election import read_until_answered
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.store import Delete, Deleted, DeletePrefix, Put, WatchBatch
from atoll.v1 import etcd_pb2 as wire


async def collect(batches: AsyncIterator[WatchBatch], last_revision: int, seen: list[int]) -> None:
    """Revisions of the events up to `last_revision`, into `seen`."""
    async with asyncio.timeout(30):
        async for batch in batches:
            assert not batch.reset
            seen += [event.mod_revision for event in batch.events]
            if seen[-1] >= last_revision:
                return


async def put_many(store: EtcdStore, count: int) -> tuple[int, int]:
    """`count` revisions of one key each. Returns the first and the last."""
    revisions = []
    for begin in range(0, count, 50):
        puts = [store.commit([Put("/atoll/w/many", b"%d" % i)]) for i in range(begin, min(begin + 50, count))]
        revisions += await asyncio.gather(*puts)
    assert sorted(revisions) == list(range(min(revisions), min(revisions) + count))
    return min(revisions), max(revisions)


async def test_puts_and_deletes_arrive_in_order_and_only_of_the_prefix(store: EtcdStore) -> None:
    begin = (await store.read_prefix("/atoll/w/")).revision + 1
    async with aclosing(store.watch("/atoll/w/", begin)) as batches:
        put = await store.commit([Put("/atoll/w/a", b"1"), Put("/atoll/w/b", b"2")])
        await store.commit([Put("/atoll/x", b"")])
        gone = await store.commit([DeletePrefix("/atoll/w/"), Put("/atoll/wider", b"")])
        again = await store.commit([Put("/atoll/w/a", b"3")])
        events: list[Any] = []
        async with asyncio.timeout(30):
            while not events or events[-1].mod_revision < again:
                batch = await anext(batches)
                events += batch.events
                assert batch.revision == events[-1].mod_revision
    assert [(e.key, e.mod_revision, isinstance(e, Deleted)) for e in events] == [
        ("/atoll/w/a", put, False),
        ("/atoll/w/b", put, False),
        ("/atoll/w/a", gone, True),
        ("/atoll/w/b", gone, True),
        ("/atoll/w/a", again, False),
    ]
    assert (events[-1].value, events[-1].create_revision) == (b"3", again)


async def test_no_event_is_lost_when_etcd_is_killed_in_the_middle_of_catching_up(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    """1. 3,000 revisions are there. 2. A watch from the first gets a part of them; their header names the last.
    3. etcd is killed and started again. 4. The watch delivers the rest: each revision once, in order."""
    first, last = await put_many(own_store, 3000)
    seen: list[int] = []
    async with aclosing(own_store.watch("/atoll/w/", first)) as batches:
        async with asyncio.timeout(30):
            seen += [event.mod_revision for event in (await anext(batches)).events]
        assert first <= seen[-1] < last, "all came at once, so this test tests nothing"
        own_etcd.kill()
        own_etcd.start()
        await collect(batches, last, seen)
    assert seen == list(range(first, last + 1))


async def test_no_event_is_lost_when_etcd_is_killed_again_and_again_under_writes(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    begin = await own_store.commit([Put("/atoll/w/many", b"")])
    seen: list[int] = []
    collecting = asyncio.create_task(_collect_until_key(own_store, "/atoll/w/end", begin, seen))
    for _ in range(3):
        await put_many(own_store, 100)
        own_etcd.kill()
        own_etcd.start()
        await read_until_answered(own_store, "/atoll/w/many")  # a write over the broken connection is not repeated
        await put_many(own_store, 100)
    end = await own_store.commit([Put("/atoll/w/end", b"")])
    await asyncio.wait_for(collecting, 30)
    assert seen == list(range(begin, end + 1))


async def test_an_etcd_that_comes_again_with_older_data_makes_the_watcher_list_again(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    """1. A watch has delivered revision 12. 2. etcd comes again with a copy of its data from revision 2, as an
    operator restores it. 3. The watch asked for revision 13 and heard nothing of the next ten writes."""
    data = own_etcd.log.parent / "data"
    begin = await own_store.commit([Put("/atoll/w/a", b"")])
    own_etcd.kill()
    shutil.copytree(data, data.with_name("copy"))
    own_etcd.start()
    await read_until_answered(own_store, "/atoll/w/a")
    _, last = await put_many(own_store, 10)
    async with aclosing(own_store.watch("/atoll/w/", begin)) as batches:
        await collect(batches, last, [])
        own_etcd.kill()
        shutil.rmtree(data)
        data.with_name("copy").rename(data)
        own_etcd.start()
        async with asyncio.timeout(30):
            assert await anext(batches) == WatchBatch(begin, (), reset=True)
            await read_until_answered(own_store, "/atoll/w/a")
            again = await own_store.commit([Put("/atoll/w/b", b"")])
            assert again < last
            seen: list[int] = []
            while not seen or seen[-1] < again:
                seen += [event.mod_revision for event in (await anext(batches)).events]


async def _collect_until_key(store: EtcdStore, key: str, begin: int, seen: list[int]) -> None:
    async with aclosing(store.watch("/atoll/w/", begin)) as batches:
        async for batch in batches:
            seen += [event.mod_revision for event in batch.events]
            if batch.events[-1].key == key:
                return


async def test_a_large_revision_comes_whole_although_etcd_sends_it_in_fragments(store: EtcdStore) -> None:
    begin = (await store.read_prefix("/atoll/w/")).revision + 1
    for i in range(5):
        await store.commit([Put(f"/atoll/w/{i}", bytes(1024 * 1024))])
    async with aclosing(store.watch("/atoll/w/", begin)) as batches:
        seen: list[int] = []
        await collect(batches, begin + 4, seen)
    assert seen == list(range(begin, begin + 5))


async def test_compacted_history_gives_a_reset_and_the_watch_goes_on(store: EtcdStore) -> None:
    old = await store.commit([Put("/atoll/w/a", b"1")])
    await store.commit([Delete("/atoll/w/a")])
    newest = await store.commit([Put("/atoll/w/b", b"2")])
    kv = store.endpoints.preferred().kv
    await kv.Compact(wire.CompactionRequest(revision=newest, physical=True), timeout=30)
    async with aclosing(store.watch("/atoll/w/", old)) as batches, asyncio.timeout(30):
        reset = await anext(batches)
        assert reset == WatchBatch(newest, (), reset=True)
        listed = await store.read_prefix("/atoll/w/")
        assert list(listed.entries) == ["/atoll/w/b"]
        assert listed.revision >= reset.revision
        after = await store.commit([Put("/atoll/w/c", b"3")])
        events: list[Any] = []
        while not events or events[-1].mod_revision < after:
            events += (await anext(batches)).events
    assert [event.key for event in events if event.mod_revision > listed.revision] == ["/atoll/w/c"]


async def test_a_frozen_etcd_is_noticed_and_the_other_endpoint_asked(
    etcd: str, own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that stays open and says nothing. (The two servers stand in for two members.)"""
    monkeypatch.setattr(watching, "_IDLE_S", 0.3)
    monkeypatch.setattr(watching, "_ANSWER_S", 0.3)
    store = EtcdStore([own_etcd.endpoint, etcd], None)
    writer = EtcdStore([etcd], None)
    try:
        batches = store.watch("/atoll/w/", (await writer.read_prefix("/atoll/w/")).revision + 1)
        waiting = asyncio.create_task(_next(batches))
        await asyncio.sleep(0.1)
        own_etcd.signal(signal.SIGSTOP)
        await writer.commit([Put("/atoll/w/a", b"1")])
        batch = await asyncio.wait_for(waiting, 30)
        assert [event.key for event in batch.events] == ["/atoll/w/a"]
        await batches.aclose()
    finally:
        await store.close()
        await writer.close()


async def test_a_quiet_connection_that_answers_is_kept(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "_IDLE_S", 0.1)
    batches = store.watch("/atoll/w/", (await store.read_prefix("/atoll/w/")).revision + 1)
    waiting = asyncio.create_task(_next(batches))
    await asyncio.sleep(1)
    assert not caplog.messages
    await store.commit([Put("/atoll/w/a", b"1")])
    assert [event.key for event in (await asyncio.wait_for(waiting, 30)).events] == ["/atoll/w/a"]
    await batches.aclose()


async def test_a_watch_ends_when_its_store_is_closed(etcd: str) -> None:
    store = EtcdStore([etcd], None)
    revision = (await store.read_prefix("/atoll/w/")).revision
    waiting = asyncio.create_task(collect(store.watch("/atoll/w/", revision + 1), revision + 1, []))
    await asyncio.sleep(0.2)
    await store.close()
    await asyncio.wait_for(waiting, 30)


async def test_a_watch_can_be_cancelled_while_etcd_is_away(own_etcd: EtcdServer, own_store: EtcdStore) -> None:
    own_etcd.kill()
    waiting = asyncio.create_task(_next(own_store.watch("/atoll/w/", 1)))
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)


async def _next(batches: AsyncGenerator[WatchBatch, None]) -> WatchBatch:
    return await anext(batches)
