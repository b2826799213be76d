"""Who leads, who does not any more, and that the latter can write nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
import time
from collections.abc import Sequence

import pytest
from etcd_server import EtcdServer
from waiting import until

from atoll.controller.state.election import Election, Leadership, until_gone
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.keys import LEADER
from atoll.controller.state.renewal import LeaseRenewal
from atoll.controller.state.store import Change, Delete, Fence, Put, Unchanged
from atoll.errors import LeadershipLost, NotFound, StoreUnavailable


def candidate(store: EtcdStore, name: bytes, ttl_s: int) -> Election:
    return Election(store, LEADER, name, ttl_s)


async def lead(election: Election) -> Leadership:
    return await asyncio.wait_for(election.campaign(), 30)


async def leader_name(election: Election) -> bytes | None:
    entry = await election.leader()
    return entry.value if entry is not None else None


async def test_one_leads_the_other_waits_and_follows_at_once_when_it_resigns(store: EtcdStore) -> None:
    one, two = candidate(store, b"one", 60), candidate(store, b"two", 60)
    assert await one.leader() is None
    first = await lead(one)
    waiting = asyncio.create_task(two.campaign())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    assert await leader_name(two) == b"one"
    await first.resign()
    assert first.lost.is_set()
    second = await asyncio.wait_for(waiting, 30)
    assert await leader_name(one) == b"two"
    with pytest.raises(LeadershipLost):
        await store.commit([Put("/atoll/a", b"")], fence=first.fence)
    await store.commit([Put("/atoll/a", b"")], fence=second.fence)
    await second.resign()
    await second.resign()
    assert await one.leader() is None


async def test_of_five_candidates_exactly_one_leads_at_a_time(store: EtcdStore) -> None:
    waiting = {asyncio.create_task(candidate(store, b"%d" % i, 60).campaign()) for i in range(5)}
    for _ in range(5):
        async with asyncio.timeout(30):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        assert len(done) == 1
        assert not any(task.done() for task in waiting)
        await done.pop().result().resign()


async def test_an_event_loop_that_is_busy_past_the_ttl_costs_no_leadership(store: EtcdStore) -> None:
    """1. A leader's event loop has work for longer than its lease. 2. Renewals were among what waited for the loop, so
    the lease ran out and another led. A thread renews it, whatever the loop does."""
    leadership = await lead(candidate(store, b"one", 4))
    busy_until_s = time.monotonic() + 6
    while time.monotonic() < busy_until_s:
        sum(range(300_000))  # holds the loop, and the interpreter as well
        time.sleep(0.05)  # noqa: ASYNC251 - so does this, and leaves a processor to other tests
    await asyncio.sleep(0.5)
    assert not leadership.lost.is_set()
    await store.commit([Put("/atoll/a", b"")], fence=leadership.fence)
    await leadership.resign()


async def test_an_event_loop_that_stands_still_is_no_leader_however_well_its_thread_reaches_etcd(
    store: EtcdStore,
) -> None:
    granted_s = time.monotonic()
    lease = await store.grant_lease(3)
    held = Fence("/atoll/a", await store.commit([Put("/atoll/a", b"", lease)]))
    renewal = LeaseRenewal(store.refresh_lease, lease, 3, granted_s, still_s=4)
    renewal._thread.join(30)  # holds the loop: that is the fault
    assert await renewal.ended() == "this controller's event loop stood still for 4 s"
    await asyncio.wait_for(until_gone(store, held), 30)
    with pytest.raises(NotFound):
        store.refresh_lease(lease, 30)
    await renewal.stop()


async def test_a_leader_whose_lease_ended_is_told_and_its_writes_are_refused(store: EtcdStore) -> None:
    first = await lead(candidate(store, b"one", 60))
    waiting = asyncio.create_task(candidate(store, b"two", 60).campaign())
    entry = await store.read(LEADER)
    assert entry is not None
    await store.revoke_lease(entry.lease)
    await asyncio.wait_for(first.lost.wait(), 30)
    second = await asyncio.wait_for(waiting, 30)
    with pytest.raises(LeadershipLost):
        await store.commit([Put("/atoll/a", b"old")], [Unchanged("/atoll/a", 0)], first.fence)
    assert await store.read("/atoll/a") is None
    await first.resign()
    assert not second.lost.is_set()
    await second.resign()


async def test_a_leader_whose_key_was_deleted_by_hand_is_told(store: EtcdStore) -> None:
    leadership = await lead(candidate(store, b"one", 60))
    await store.commit([Delete(LEADER)])
    await asyncio.wait_for(leadership.lost.wait(), 30)
    await leadership.resign()


async def test_a_leader_cut_off_from_etcd_gives_up_when_its_ttl_is_over_not_before(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    leadership = await lead(candidate(own_store, b"one", 8))
    began_s = time.monotonic()
    own_etcd.signal(signal.SIGSTOP)
    await asyncio.wait_for(leadership.lost.wait(), 30)
    assert time.monotonic() - began_s > 4
    own_etcd.signal(signal.SIGCONT)
    await leadership.resign()


class TellsOfRenewals(EtcdStore):
    """Whether the newest renewal of a lease was answered."""

    answered = True

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        try:
            left_s = super().refresh_lease(lease, timeout_s)
        except StoreUnavailable:
            self.answered = False
            raise
        self.answered = True
        return left_s


async def test_a_short_outage_of_etcd_costs_no_leadership(own_etcd: EtcdServer) -> None:
    """1. A renewal fails. 2. etcd is there again before the lease is over: a later one does not."""
    store = TellsOfRenewals([own_etcd.endpoint], None, timeout_s=10)
    leadership = await lead(candidate(store, b"one", 12))
    own_etcd.kill()
    await until(lambda: not store.answered)
    own_etcd.start()
    await until(lambda: store.answered)
    assert not leadership.lost.is_set()
    await store.commit([Put("/atoll/a", b"")], fence=leadership.fence)
    await leadership.resign()
    await store.close()


async def test_a_campaign_begun_while_etcd_is_away_is_won_when_it_returns(
    own_etcd: EtcdServer, own_store: EtcdStore
) -> None:
    own_etcd.kill()
    waiting = asyncio.create_task(candidate(own_store, b"one", 60).campaign())
    await asyncio.sleep(0.5)
    own_etcd.start()
    leadership = await asyncio.wait_for(waiting, 30)
    await leadership.resign()


class LosesTheAnswer(EtcdStore):
    """What is committed arrives; that it did is not heard."""

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        await super().commit(changes, conditions, fence)
        raise StoreUnavailable("the answer was lost")


async def test_a_candidate_that_never_heard_that_it_won_finds_out_by_its_lease(etcd: str, store: EtcdStore) -> None:
    deaf = LosesTheAnswer([etcd], None, timeout_s=30)
    leadership = await lead(candidate(deaf, b"one", 60))
    await store.commit([Put("/atoll/a", b"")], fence=leadership.fence)
    await leadership.resign()
    await deaf.close()


PAUSED_LEADER = """
    import asyncio, sys
    from atoll.controller.state.election import Election
    from atoll.controller.state.etcd import EtcdStore
    from atoll.controller.state.keys import LEADER
    from atoll.controller.state.store import Put
    from atoll.errors import LeadershipLost, NotFound, StoreUnavailable

    async def main():
        store = EtcdStore([sys.argv[1]], None, timeout_s=30)
        leadership = await Election(store, LEADER, b"paused", 1).campaign()
        print("leads", flush=True)
        sys.stdin.readline()  # blocks the whole loop: nothing here can notice the lost lease before it writes
        try:
            await store.commit([Put("/atoll/a", b"late")], fence=leadership.fence)
            print("wrote", flush=True)
        except LeadershipLost:
            print("refused", flush=True)
        await leadership.resign()
        await store.close()

    asyncio.run(main())
"""


async def test_a_leader_process_stopped_past_its_ttl_can_write_nothing_when_it_goes_on(store: EtcdStore) -> None:
    """1. A process leads. 2. SIGSTOP. 3. Its ttl passes, another leads. 4. SIGCONT: its write is refused."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(PAUSED_LEADER),
        store.endpoints.preferred().address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"leads\n"
        process.send_signal(signal.SIGSTOP)
        second = await lead(candidate(store, b"second", 60))
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"\n")
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"refused\n"
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert await store.read("/atoll/a") is None
        assert not second.lost.is_set()
        await second.resign()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
