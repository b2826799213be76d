"""EtcdStore on a real etcd: transactions, the leader's fence, limits, deadlines, leases."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
from etcd_server import EtcdServer
from held_ports import free_port

from atoll.controller.state.election import read_until_answered
from atoll.controller.state.etcd import EtcdStore, _until_kept
from atoll.controller.state.store import (
    Change,
    Delete,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    Unchanged,
)
from atoll.errors import BadInput, Conflict, LeadershipLost, NotFound, StoreUnavailable
from atoll.v1 import etcd_pb2 as wire


async def test_what_was_committed_is_read_with_its_revisions(store: EtcdStore) -> None:
    first = await store.commit([Put("/atoll/a", b"1")])
    second = await store.commit([Put("/atoll/a", b"2"), Put("/atoll/b", b"")])
    assert await store.read("/atoll/a") == Entry("/atoll/a", b"2", second, first, 0)
    assert await store.read("/atoll/b") == Entry("/atoll/b", b"", second, second, 0)
    assert await store.read("/atoll/c") is None


async def test_a_listing_is_sorted_whole_and_of_one_revision_over_many_pages(store: EtcdStore) -> None:
    for begin in range(0, 1100, 100):
        await store.commit([Put(f"/atoll/n/{i:05d}", b"%d" % i) for i in range(begin, begin + 100)])
    revision = await store.commit([Put("/atoll/nothing-of-it", b"")])
    seen = await store.read_prefix("/atoll/n/")
    assert list(seen.entries) == [f"/atoll/n/{i:05d}" for i in range(1100)]
    assert [entry.value for entry in seen.entries.values()] == [b"%d" % i for i in range(1100)]
    assert seen.revision == revision
    assert (await store.read_prefix("/atoll/none/")).entries == {}


async def test_deletes_take_one_key_or_a_prefix(store: EtcdStore) -> None:
    await store.commit([Put(key, b"x") for key in ("/atoll/j/1", "/atoll/j/2", "/atoll/j", "/atoll/k")])
    await store.commit([DeletePrefix("/atoll/j/"), Delete("/atoll/k"), Put("/atoll/l", b"y")])
    assert list((await store.read_prefix("/atoll/")).entries) == ["/atoll/j", "/atoll/l"]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        (lambda revision: Unchanged("/atoll/a", revision - 1), "was changed at revision"),
        (lambda revision: Unchanged("/atoll/b", revision), "was deleted since"),
        (lambda revision: Unchanged("/atoll/a", 0), "exists already"),
    ],
)
async def test_a_condition_that_fails_is_named_and_nothing_is_written(
    store: EtcdStore, condition: Callable[[int], Unchanged], told: str
) -> None:
    revision = await store.commit([Put("/atoll/a", b"1")])
    holds = [Unchanged("/atoll/a", revision), Unchanged("/atoll/b", 0)]
    await store.commit([Put("/atoll/seen", b"")], holds)
    with pytest.raises(Conflict, match=told):
        await store.commit([Put("/atoll/c", b"")], [*holds, condition(revision)])
    assert await store.read("/atoll/c") is None


async def test_of_two_who_read_the_same_only_one_writes(store: EtcdStore) -> None:
    revision = await store.commit([Put("/atoll/a", b"0")])
    writes = [store.commit([Put("/atoll/a", b"%d" % i)], [Unchanged("/atoll/a", revision)]) for i in range(8)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 7


async def test_a_fence_refuses_who_does_not_lead_even_where_conditions_fail_too(store: EtcdStore) -> None:
    first = Fence("/atoll/leader", await store.commit([Put("/atoll/leader", b"one")]))
    await store.commit([Put("/atoll/a", b"1")], [Unchanged("/atoll/a", 0)], first)
    with pytest.raises(Conflict):
        await store.commit([Put("/atoll/a", b"2")], [Unchanged("/atoll/a", 0)], first)
    await store.commit([Delete("/atoll/leader")])
    with pytest.raises(LeadershipLost, match="is gone"):
        await store.commit([Put("/atoll/a", b"3")], [Unchanged("/atoll/a", 0)], first)
    second = Fence("/atoll/leader", await store.commit([Put("/atoll/leader", b"two")]))
    with pytest.raises(LeadershipLost, match="created anew"):
        await store.commit([Put("/atoll/a", b"4")], fence=first)
    await store.commit([Put("/atoll/a", b"5")], fence=second)
    entry = await store.read("/atoll/a")
    assert entry is not None
    assert entry.value == b"5"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([Put(f"/atoll/{i}", b"") for i in range(129)], "129 changes"),
        ([Put("/atoll/a", bytes(1536 * 1024))], "bytes exceed"),
        ([Put("/atoll/a", b"1"), Put("/atoll/a", b"2")], "duplicate key"),
        ([DeletePrefix("")], "empty prefix"),
    ],
)
async def test_a_commit_beyond_the_limits_is_bad_input(store: EtcdStore, changes: list[Change], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        await store.commit(changes)


async def test_the_largest_commit_that_is_let_through_is_taken_by_etcd(store: EtcdStore) -> None:
    await store.commit([Put("/atoll/a", bytes(1536 * 1024 - 600))])
    await store.commit([Put(f"/atoll/{i:03d}", b"x") for i in range(128)], [Unchanged("/atoll/b", 0)] * 128)
    assert len((await store.read_prefix("/atoll/")).entries) == 129


async def test_commit_to_a_killed_etcd_fails_within_the_deadline_and_works_again(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    revision = await own_store.commit([Put("/atoll/a", b"1")])
    own_etcd.kill()
    with pytest.raises(StoreUnavailable, match=r"Is it running|outcome is unknown"):
        async with asyncio.timeout(30):
            await own_store.commit([Put("/atoll/a", b"2")])
    own_etcd.start()
    assert await own_store.commit([Put("/atoll/a", b"3")], [Unchanged("/atoll/a", revision)]) > revision


async def test_a_write_counts_as_made_only_while_the_etcd_that_took_it_runs(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    """1. etcd 3.5.1 is killed right behind its answer to a write, at load. 2. It came again without the write (2 of
    529 tries), which commit had acknowledged. One member answers before its log has a write; a read comes after it.
    """
    await own_store.commit([Put("/atoll/a", b"1")])
    member = own_store.endpoints.preferred()
    reply = await member.kv.Txn(wire.TxnRequest())
    await _until_kept(member, reply.header.raft_term, "writing /atoll/a", 10)
    own_etcd.kill()
    with pytest.raises(StoreUnavailable, match="in its log, so the outcome is unknown"):
        await _until_kept(member, reply.header.raft_term, "writing /atoll/a", 10)
    own_etcd.start()
    await read_until_answered(own_store, "/atoll/a")
    with pytest.raises(StoreUnavailable, match="in its log, so the outcome is unknown"):
        await _until_kept(member, reply.header.raft_term, "writing /atoll/a", 10)


async def test_a_commit_to_a_frozen_etcd_says_that_its_outcome_is_unknown(own_etcd: EtcdServer) -> None:
    store = EtcdStore([own_etcd.endpoint], None, timeout_s=3)
    try:
        await read_until_answered(store, "/atoll/a")
        own_etcd.signal(signal.SIGSTOP)
        async with asyncio.timeout(30):
            with pytest.raises(StoreUnavailable, match="outcome is unknown"):
                await store.commit([Put("/atoll/a", b"1")])
            with pytest.raises(StoreUnavailable, match="cannot be used"):
                await store.read("/atoll/a")
        own_etcd.signal(signal.SIGCONT)
        assert await read_until_answered(store, "/atoll/b") is None
        assert await store.commit([Put("/atoll/b", b"2")], [Unchanged("/atoll/b", 0)]) > 1
    finally:
        await store.close()


async def test_a_dead_endpoint_among_several_is_passed_over(etcd: str) -> None:
    dead = f"127.0.0.1:{free_port()}"
    store = EtcdStore([dead, dead, etcd], None, timeout_s=30)
    try:
        revision = await store.commit([Put("/atoll/a", b"1")])
        assert await store.read("/atoll/a") == Entry("/atoll/a", b"1", revision, revision, 0)
    finally:
        await store.close()


async def test_reads_leave_time_for_the_others_when_one_member_is_frozen(etcd: str, own_etcd: EtcdServer) -> None:
    store = EtcdStore([own_etcd.endpoint, etcd], None, timeout_s=6)
    try:
        await store.read("/atoll/a")
        own_etcd.signal(signal.SIGSTOP)
        assert await store.read("/atoll/a") is None
    finally:
        await store.close()


async def test_a_closed_store_refuses_in_place_of_hanging(etcd: str) -> None:
    store = EtcdStore([etcd], None)
    await store.read("/atoll/a")
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.read("/atoll/a")


async def test_a_call_under_way_when_the_store_closes_fails_and_is_not_cancelled(own_etcd: EtcdServer) -> None:
    store = EtcdStore([own_etcd.endpoint], None, timeout_s=30)
    await store.read("/atoll/a")
    own_etcd.signal(signal.SIGSTOP)
    reading = asyncio.create_task(store.read("/atoll/a"))
    await asyncio.sleep(0.1)
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await reading


async def test_no_endpoints_and_nonsense_endpoints_are_bad_input() -> None:
    for endpoints in ([], ["a:b:c"], [""]):
        with pytest.raises(BadInput):
            EtcdStore(endpoints, None)


async def test_a_lease_takes_its_keys_along_when_it_expires(store: EtcdStore) -> None:
    lease = await store.grant_lease(3)
    await store.commit([Put("/atoll/node", b"x", lease)])
    assert store.refresh_lease(lease, 30) == 3
    entry = await store.read("/atoll/node")
    assert entry is not None
    assert entry.lease == lease
    async with asyncio.timeout(30):
        async for batch in store.watch("/atoll/node", entry.mod_revision + 1):
            assert batch.events[0].key == "/atoll/node"
            break
    assert await store.read("/atoll/node") is None
    with pytest.raises(NotFound, match="expired"):
        store.refresh_lease(lease, 30)
    with pytest.raises(NotFound, match="lease not found"):
        await store.commit([Put("/atoll/node", b"x", lease)])


async def test_a_revoked_lease_takes_its_keys_along_at_once_and_may_be_revoked_again(store: EtcdStore) -> None:
    lease = await store.grant_lease(60)
    await store.commit([Put("/atoll/node", b"x", lease)])
    await store.revoke_lease(lease)
    await store.revoke_lease(lease)
    assert await store.read("/atoll/node") is None
