"""The jobs as etcd has them, mirrored in the leader's memory, and the only way to change them.

Every change of a job is one fenced transaction that also carries its events. What was written is mirrored at once; the
watch tells of what others wrote.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from atoll.controller.jobs.model.observed import JobStep
from atoll.controller.jobs.records import retention
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state import keys
from atoll.controller.state.codec import Record, decode, encode
from atoll.controller.state.events import EventRecord, NewEvent
from atoll.controller.state.records import (
    AdmissionRecord,
    JobRecord,
    NodeRecord,
    PlacementRecord,
    PlanRecord,
    RunRecord,
)
from atoll.controller.state.recovery import CommitRecord
from atoll.controller.state.store import (
    Change,
    Delete,
    Deleted,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    StateStore,
    Unchanged,
)
from atoll.controller.state.views import ViewRecord
from atoll.errors import BadInput, Conflict, NotFound, StoreUnavailable

logger = logging.getLogger(__name__)
Changed = TypeVar("Changed")

KEPT_OLD_RUNS: Final = 64
MAX_LIVE_JOBS: Final = 1000
FOLLOW_RETRY_S: Final = 0.5
CHANGES_AT_ONCE: Final = 64
"""A transaction of etcd carries 128 changes by default."""


def _batches(changes: Sequence[Changed]) -> Iterator[Sequence[Changed]]:
    return (changes[i : i + CHANGES_AT_ONCE] for i in range(0, len(changes), CHANGES_AT_ONCE))


async def _until_answered(ask: Callable[[], Awaitable[None]]) -> None:
    """Do what reads etcd, again and again until it answers. Holds nothing between two tries."""
    while True:
        try:
            return await ask()
        except StoreUnavailable as error:
            logger.warning("%s; reading again in %.1f s", error, FOLLOW_RETRY_S)
            await asyncio.sleep(FOLLOW_RETRY_S)


class Ledger:
    """Jobs, runs, plans and events. `changed` is called when another than the reconciler changed something."""

    def __init__(
        self,
        store: StateStore,
        fence: Fence,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store: Final = store
        self.fence: Final = fence
        self.jobs: dict[str, JobState] = {}
        self.unreadable: dict[str, str] = {}
        self.writing = asyncio.Lock()
        """Held from looking at a job to having written what follows from it."""
        self._changed = changed
        self._clock = clock
        self._wall_clock = wall_clock
        self._cluster_events = 0
        self._telling = asyncio.Lock()
        self._revision = 0
        self._nodes_of_old: dict[tuple[str, int], tuple[str, ...]] = {}

    # Reading

    async def load(self) -> dict[str, NodeRecord]:
        """Mirror everything. Returns the nodes that an earlier leader knew."""
        snapshot = await self.store.read_prefix(keys.JOBS)
        self._revision = snapshot.revision
        for job in self.jobs.keys() - {keys.last_segment(key) for key in snapshot.entries}:
            del self.jobs[job]
        for entry in snapshot.entries.values():
            await self._take(entry)
        events = await self.store.read_prefix(keys.events_prefix(keys.CLUSTER))
        self._cluster_events = max((int(keys.last_segment(key)) for key in events.entries), default=0)
        nodes: dict[str, NodeRecord] = {}
        for key, entry in (await self.store.read_prefix(keys.NODES)).entries.items():
            try:
                nodes[keys.last_segment(key)] = decode(NodeRecord, key, entry.value)
            except BadInput as error:
                logger.warning("%s", error)
        return nodes

    async def follow(self) -> None:
        """Take over what others write, until cancelled. What etcd does not answer is asked again, never passed over."""
        async with aclosing(self.store.watch(keys.JOBS, self._revision + 1)) as batches:
            async for batch in batches:
                if batch.reset:
                    await _until_answered(self._list_again)
                for event in batch.events:
                    await _until_answered(lambda event=event: self._follow_one(event))  # type: ignore[misc]

    async def _list_again(self) -> None:
        async with self.writing:
            await self.load()
        self._changed()

    async def _follow_one(self, event: Entry | Deleted) -> None:
        job = keys.last_segment(event.key)
        async with self.writing:
            state = self.jobs.get(job)
            if state is not None and event.mod_revision <= state.revision:
                return  # our own write, or one older than what we know
            if isinstance(event, Deleted):
                self.jobs.pop(job, None)
                self.unreadable.pop(job, None)
            else:
                await self._take(event)
        self._changed()

    async def reread(self, job: str) -> None:
        """Read one job anew, after a write whose outcome is not known. Call with `writing` held."""
        entry = await self.store.read(keys.job(job))
        if entry is None:
            self.jobs.pop(job, None)
        else:
            await self._take(entry)

    async def _take(self, entry: Entry) -> None:
        """Mirror a job's entry, with its newest run and plans where it still lives."""
        name = keys.last_segment(entry.key)
        try:
            job = decode(JobRecord, entry.key, entry.value)
            run = await self._read_run(job)
            plans = await self.plans(job.id, job.status.run) if run else []
            placement = await self.placement(job.id, job.status.run) if run else None
            views = tuple(await self._list(ViewRecord, keys.views_prefix(job.id, job.status.run))) if run else ()
            commit = await self._read(CommitRecord, keys.commit(job.id))
        except BadInput as error:
            if self.unreadable.get(name) != str(error):
                logger.error("job %s is left alone: %s", name, error)
            self.unreadable[name] = str(error)
            self.jobs.pop(name, None)
            return
        self.unreadable.pop(name, None)
        before, now_s = self.jobs.get(name), self._clock()
        state = JobState(job, entry.mod_revision, entry.create_revision, now_s, run)
        state.view_since_s = state.joining_since_s = now_s
        if before and (before.job.status.phase, before.job.status.run) == (job.status.phase, job.status.run):
            since_s = before.view_since_s if before.views[-1:] == views[-1:] else now_s
            state = replace(before, job=job, revision=entry.mod_revision, run=run, view_since_s=since_s)
        state.plans, state.placement, state.commit, state.views = tuple(plans), placement, commit, views
        state.stale = False
        self.jobs[name] = state

    async def _read_run(self, job: JobRecord) -> RunRecord | None:
        if not job.status.run:
            return None
        key = keys.run(job.id, job.status.run)
        if (run := await self._read(RunRecord, key)) is None:
            raise BadInput(f"etcd key {key} is missing, though job {job.id} is in run {job.status.run}")
        return run

    async def _read(self, kind: type[Record], key: str) -> Record | None:
        entry = await self.store.read(key)
        return decode(kind, key, entry.value) if entry else None

    async def _list(self, kind: type[Record], prefix: str) -> list[Record]:
        snapshot = await self.store.read_prefix(prefix)
        return [decode(kind, key, entry.value) for key, entry in sorted(snapshot.entries.items())]

    async def nodes_of(self, job: str, run: int) -> tuple[str, ...]:
        """Return the node of each rank of a run; empty if etcd does not have the run any more."""
        state = self.jobs.get(job)
        if state is not None and state.run is not None and state.run.run == run:
            return tuple(member.node for member in state.run.members)
        if (known := self._nodes_of_old.get((job, run))) is None:
            if (record := await self._read(RunRecord, keys.run(job, run))) is None:
                return ()
            known = tuple(member.node for member in record.members)
            while len(self._nodes_of_old) >= KEPT_OLD_RUNS:
                del self._nodes_of_old[next(iter(self._nodes_of_old))]
            self._nodes_of_old[job, run] = known
        return known

    def find(self, name: str) -> JobState:
        """Return the job with this id, or the newest one with this name. Raises NotFound."""
        if name in self.jobs:
            return self.jobs[name]
        if name in self.unreadable:
            raise BadInput(f"job {name}: {self.unreadable[name]}")
        named = [state for state in self.jobs.values() if state.job.spec.name == name]
        if not named:
            raise NotFound(f"no job {name!r}. `atoll jobs --all` lists them")
        return max(named, key=lambda state: state.created)

    # Writing

    async def write(self, state: JobState, step: JobStep) -> None:
        """Write what a step changed of a job, in one transaction. Call with `writing` held.

        Raises Conflict where somebody else wrote it since it was read (it is read anew then), StoreUnavailable,
        LeadershipLost.
        """
        run, before = step.run, step.job.status.events
        job = replace(step.job, status=replace(step.job.status, events=before + len(step.events)))
        changes: list[Change] = [] if job == state.job else [Put(keys.job(job.id), encode(job))]
        if run is not None and run != state.run:
            changes.append(Put(keys.run(job.id, run.run), encode(run)))
            if state.run is None or run.run != state.run.run:
                changes += retention.outlived_by_run(job.id, run.run)
        if step.placement is not None:
            changes.append(Put(keys.placement(job.id, step.placement.run), encode(step.placement)))
        if (plan := step.plan) is not None:  # launches carry the first
            key = partial(keys.plan, job.id, plan.run)
            changes += retention.newest(key, plan.id, plan, retention.KEPT_PLANS, oldest=2)
        for view in step.views:
            changes += retention.newest(partial(keys.view, job.id, view.run), view.view, view, retention.KEPT_VIEWS)
        for admission in step.decisions:
            key = partial(keys.admission, job.id)
            changes += retention.newest(key, admission.id, admission, retention.KEPT_ADMISSIONS)
        changes += self._event_changes(job.id, run.run if run else job.status.run, before, step.events)
        if not changes:
            return
        try:
            revision = await self.store.commit(changes, [Unchanged(keys.job(job.id), state.revision)], self.fence)
        except StoreUnavailable:
            state.stale = True
            raise
        except Conflict:
            await self.reread(job.id)
            raise
        self._mirror(state, job, step, revision)

    async def commit(self, complete: Sequence[CommitRecord]) -> None:
        """Write which generations count. Call with `writing` held. Raises StoreUnavailable, LeadershipLost."""
        for batch in _batches(complete):
            await self.store.commit([Put(keys.commit(one.job), encode(one)) for one in batch], (), self.fence)
            for one in batch:
                self.jobs[one.job].commit = one

    async def remove_nodes(self, names: Sequence[str]) -> None:
        """Remove nodes that were lost, so that no later leader waits for them."""
        for batch in _batches(names):
            await self.store.commit([Delete(keys.node(name)) for name in batch], (), self.fence)

    def _mirror(self, state: JobState, job: JobRecord, step: JobStep, revision: int) -> None:
        """Take over what was written. job: with the numbers of the step's events."""
        now_s, run, plan, is_new_run = self._clock(), step.run, step.plan, job.status.run != state.job.status.run
        if job != state.job:
            state.revision = revision
        if job.status.phase is not state.job.status.phase or is_new_run:
            state.since_s, state.finished_since_s, state.judged_s = now_s, None, -math.inf
        if is_new_run or step.placement is not None:
            state.placement = step.placement
        if state.run is None or (run is not None and len(run.members) != len(state.run.members)):
            state.joining_since_s = now_s
        if is_new_run:
            state.views, state.broken_since_s, state.handed_bytes = (), None, {}
        if step.views:
            merged = {view.view: view for view in (*state.views, *step.views)}
            state.views = tuple(merged[number] for number in sorted(merged))[-retention.KEPT_VIEWS :]
            state.view_since_s = now_s
        if plan is not None:
            issued = (*state.plans, plan) if plan.run == state.job.status.run else (plan,)
            state.plans, state.planned_s = retention.kept(issued), now_s
        state.job, state.run = job, run or state.run

    def _event_changes(self, job: str, run: int, before: int, events: Sequence[NewEvent]) -> list[Change]:
        changes: list[Change] = []
        for sequence, event in enumerate(events, before + 1):
            owner = "" if job == keys.CLUSTER else job
            record = EventRecord.of(event, sequence=sequence, unix_s=self._wall_clock(), job=owner, run=run)
            changes += retention.newest(partial(keys.event, job), sequence, record, retention.KEPT_EVENTS)
        return changes

    async def cluster_event(self, event: NewEvent, changes: Sequence[Change] = ()) -> None:
        """Write an event of no job, and what it tells of. After an unknown outcome the same number is written again: no
        gap, none twice."""
        async with self._telling:
            told = self._event_changes(keys.CLUSTER, 0, self._cluster_events, [event])
            await self.store.commit([*changes, *told], (), self.fence)
            self._cluster_events += 1

    @property
    def cluster_events(self) -> int:
        """The number of the newest event of the cluster."""
        return self._cluster_events

    def check_room(self) -> None:
        """Raises Conflict where no more jobs are taken."""
        live = sum(not state.job.status.phase.ended for state in self.jobs.values())
        if live >= MAX_LIVE_JOBS:
            raise Conflict(f"{live} jobs are alive, no more than {MAX_LIVE_JOBS} are taken. Cancel some first")

    async def add(self, job: JobRecord, event: NewEvent) -> JobState:
        """Write a new job together with the request that made it. Raises Conflict where either exists."""
        job = replace(job, status=replace(job.status, events=1))
        key = keys.job(job.id)
        changes: list[Change] = [Put(key, encode(job)), Put(keys.request(job.request_id), job.id.encode())]
        changes += self._event_changes(job.id, 0, 0, [event])
        conditions = [Unchanged(key, 0), Unchanged(keys.request(job.request_id), 0)]
        revision = await self.store.commit(changes, conditions, self.fence)
        state = self.jobs[job.id] = JobState(job, revision, revision, self._clock())
        return state

    async def remove_oldest(self) -> list[str]:
        """Remove ended jobs beyond the newest KEPT_ENDED_JOBS. Call with `writing` held. Returns their ids."""
        ended = sorted((s for s in self.jobs.values() if s.job.status.phase.ended), key=lambda s: s.created)
        removed = []
        for state in ended[: max(len(ended) - retention.KEPT_ENDED_JOBS, 0)]:
            await self.remove(state)
            removed.append(state.job.id)
        return removed

    async def remove(self, state: JobState, told: NewEvent | None = None) -> None:
        """Remove a job with all that is its own, and its code unless others use that. Call with `writing` held.

        told: an event of the cluster."""
        job = state.job
        changes = retention.all_of(job)
        if job.spec.code_sha256 not in self.code_used(without=job.id) and not self.unreadable:
            changes.append(DeletePrefix(keys.code_prefix(job.spec.code_sha256)))
        if told is None:
            await self.store.commit(changes, (), self.fence)
        else:
            await self.cluster_event(told, changes)
        self.jobs.pop(job.id, None)

    def code_used(self, without: str = "") -> set[str]:
        """SHA-256 of the bundles that jobs use, but for one job."""
        return {state.job.spec.code_sha256 for name, state in self.jobs.items() if name != without}

    async def plans(self, job: str, run: int) -> list[PlanRecord]:
        """All plans of a run, in order; none where there is no such run."""
        return await self._list(PlanRecord, keys.plans_prefix(job, run))

    async def placement(self, job: str, run: int) -> PlacementRecord | None:
        """Return the placement of a run; None where its machines hold no copies."""
        return await self._read(PlacementRecord, keys.placement(job, run))

    async def admissions(self, job: str, run: int) -> list[AdmissionRecord]:
        """The kept ones of a run, in order."""
        return [one for one in await self._list(AdmissionRecord, keys.admissions_prefix(job)) if one.run == run]

    async def events(self, job: str, after: int) -> list[EventRecord]:
        """The kept events of a job (or of the cluster) with numbers above `after`, in order."""
        return [event for event in await self._list(EventRecord, keys.events_prefix(job)) if event.sequence > after]
