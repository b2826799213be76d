"""LeaseKeeper: 1,000 leases over one stream, no more refreshes than needed, honest about what expired."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from etcd_server import EtcdServer
from waiting import until

from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.leases import LeaseKeeper
from atoll.controller.state.store import Put
from atoll.errors import NotFound
from atoll.v1 import etcd_pb2 as wire


@asynccontextmanager
async def running(keeper: LeaseKeeper) -> AsyncIterator[LeaseKeeper]:
    task = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def remaining_s(store: EtcdStore, lease: int) -> int:
    """What etcd says, without refreshing it."""
    reply: Any = await store.endpoints.preferred().lease.LeaseTimeToLive(
        wire.LeaseTimeToLiveRequest(ID=lease), timeout=30
    )
    return int(reply.TTL)


async def test_a_touched_lease_outlives_its_time_and_an_untouched_one_ends(store: EtcdStore) -> None:
    expired: list[int] = []
    touched, silent = await store.grant_lease(3), await store.grant_lease(3)
    await store.commit([Put("/atoll/touched", b"", touched), Put("/atoll/silent", b"", silent)])
    async with running(LeaseKeeper(store, expired.append)) as keeper:
        keeper.keep(touched, 3)
        keeper.keep(silent, 3)
        granted_s = time.monotonic()
        async with asyncio.timeout(30):
            while await store.read("/atoll/silent") is not None or time.monotonic() - granted_s < 4:
                keeper.touch(touched)
                await asyncio.sleep(0.08)
        assert await store.read("/atoll/touched") is not None
        assert expired == []
        keeper.touch(silent)  # too late
        await until(lambda: expired == [silent])
        keeper.touch(silent)
        assert len(keeper) == 1


async def test_a_thousand_nodes_beating_ten_times_cost_one_refresh_each_in_a_third_of_the_ttl(store: EtcdStore) -> None:
    now_s = 0.0
    keeper = LeaseKeeper(store, pytest.fail, clock=lambda: now_s)
    leases = await asyncio.gather(*(store.grant_lease(60) for _ in range(1000)))
    async with running(keeper):
        for lease in leases:
            keeper.keep(lease, 60)
        await asyncio.sleep(1.1)  # so that a refreshed lease can be told from a new one
        began_s = time.monotonic()
        for tick in range(10):
            now_s = 20.0 + tick
            for lease in leases:
                keeper.touch(lease)
            assert len(keeper._due) == (1000 if tick == 0 else 0)
            await until(lambda: not keeper._due and not keeper._asked)
        left_s = await asyncio.gather(*(remaining_s(store, lease) for lease in leases[::100]))
        assert min(left_s) >= 59 - (time.monotonic() - began_s)


async def test_touches_during_an_outage_are_sent_after_it(own_etcd: EtcdServer, own_store: EtcdStore) -> None:
    expired: list[int] = []
    lease = await own_store.grant_lease(60)
    async with running(LeaseKeeper(own_store, expired.append)) as keeper:
        keeper.keep(lease, 0.01)  # every touch is due
        own_etcd.kill()
        await asyncio.sleep(0.1)
        keeper.touch(lease)
        own_etcd.start()
        await until(lambda: not keeper._due and not keeper._asked)
        await own_store.revoke_lease(lease)
        keeper.touch(lease)
        await until(lambda: expired == [lease])


async def test_a_forgotten_lease_is_not_refreshed(store: EtcdStore) -> None:
    keeper = LeaseKeeper(store, pytest.fail)
    lease = await store.grant_lease(60)
    async with running(keeper):
        keeper.keep(lease, 0.01)
        await asyncio.sleep(0.02)
        keeper.forget(lease)
        keeper.touch(lease)
        assert not keeper._due
    await store.revoke_lease(lease)
    with pytest.raises(NotFound):
        store.refresh_lease(lease, 30)


async def test_the_keeper_ends_when_its_store_is_closed(etcd: str) -> None:
    store = EtcdStore([etcd], None)
    serving = asyncio.create_task(LeaseKeeper(store, pytest.fail).run())
    await asyncio.sleep(0.1)
    await store.close()
    await asyncio.wait_for(serving, 30)
