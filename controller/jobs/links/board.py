"""Board of the links between nodes, of one leader epoch: asks agents to measure, keeps the newest measurements, and
places nodes into islands.

All on the event loop, in memory. The planner runs on a thread, at most a twentieth of the time. Islands are in the
nodes' records, so a new leader continues with them and measures again."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.links.schedule import (
    CONFIRM_S,
    MeasurableNode,
    MeasurementQueue,
    Pair,
    PairHistory,
    PairMeasurement,
    pair_of,
    rest_s,
    wanted_pairs,
)
from atoll.controller.jobs.model.peer_links import PeerLink, PeerLinks
from atoll.controller.planners.islands.clusters import IslandNode, IslandsInput, IslandsPlan, NodePair, free_name
from atoll.controller.planners.registry import ISLANDS
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import NodeRecord
from atoll.errors import StoreUnavailable
from atoll.relay.handshake import node_key
from atoll.v1 import agents_pb2

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
LOOKING_SHARE: Final = 0.02
"""Largest share of time in which pairs are looked through: 25 ms with 1,000 nodes."""
GROUP_EVERY_S: Final = 0.5
"""Least time between two runs of the planner."""
GROUPING_SHARE: Final = 0.05
"""Largest share of time in which the planner runs."""
ANSWER_S: Final = 30.0
"""Seconds after which an agent that did not answer is no longer waited for."""
FIRST_MEASUREMENTS_S: Final = 20.0
"""Longest time that runs wait for the first measurements of a node that joined, in seconds."""
MAX_LINKS: Final = 200_000
"""Directed measurements in memory; beyond it those of nodes that are gone are dropped."""
READINGS: Final = 2
"""Newest readings of a link, of which the best counts: a busy machine, or the traffic of training, makes a link look
thin for a moment."""
MAX_READING_RATIO: Final = 2.0
"""Largest ratio of two readings that confirm each other."""
MAX_CHANGES_TOLD: Final = 64
"""Changes of islands with an event of their own, of one run of the planner."""


class LinkBoard:
    """The links and islands of a leader epoch. write: stores a node's changed record; tell: writes an event of the
    cluster; changed: calls for a pass of the reconciler."""

    def __init__(
        self,
        sessions: AgentSessions,
        write: Callable[[NodeRecord], Awaitable[None]],
        tell: Callable[[NewEvent], None],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions, self._write, self._tell, self._changed, self._clock = sessions, write, tell, changed, clock
        self._measured: dict[Pair, PeerLink] = {}  # by sender and receiver
        self.links: Final = PeerLinks(self._measured)
        self._sent: defaultdict[str, dict[str, PeerLink]] = defaultdict(dict)  # the same, by sender
        self._readings: dict[Pair, deque[PeerLink]] = {}
        self._placed: dict[str, NodeRecord] = {}
        self._queue = MeasurementQueue()
        self._free_s: dict[str, float] = {}
        self._deferred_rest_s: dict[str, float] = {}  # rest that a node did not get before a confirmation
        self._asked: dict[str, tuple[str, float]] = {}  # by measuring node: the other one, and since when
        self._trouble: dict[str, str] = {}
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._regroup = True
        self._group_s = 0.0

    def remember(self, record: NodeRecord) -> None:
        """Continue with the island of a node of an earlier leader."""
        self._placed[record.name] = record

    def place(self, record: NodeRecord) -> NodeRecord:
        """Return the record of an agent that registers with its island: the operator's, that before, that of its
        host, or a new one until it is measured."""
        before = self._placed.get(record.name)
        if before is not None and _moved(before, record):
            before = None
            self._forget(record.name)
        if record.named_island:
            placed = replace(record, island=record.named_island, island_reason="named by the operator")
        elif before is not None and before.island and not before.named_island:
            placed = replace(record, island=before.island, island_reason=before.island_reason)
        else:
            placed = replace(record, island=self._first_island(record))
        self._placed[record.name] = placed
        self._regroup = True
        return placed

    def _first_island(self, record: NodeRecord) -> str:
        others = [one for name, one in self._placed.items() if name != record.name and one.island]
        if record.behind_nat:
            return record.name if all(one.island != record.name for one in others) else self._free_island(record.name)
        here = {one.island for one in others if record.host and one.host == record.host and not one.behind_nat}
        return here.pop() if len(here) == 1 else self._free_island(record.name)

    def _free_island(self, name: str) -> str:
        return free_name(one.island for other, one in self._placed.items() if other != name)

    def _forget(self, name: str) -> None:
        """Drop the measurements of a node that moved."""
        for pair in [pair for pair in self._measured if name in pair]:
            del self._measured[pair]
            del self._sent[pair[0]][pair[1]]
            self._readings.pop(pair, None)
        for pair in [pair for pair in self._queue.history if name in pair]:
            del self._queue.history[pair]

    async def run(self) -> None:
        """Ask for measurements and place nodes until cancelled. Raises LeadershipLost."""
        while True:
            began_s = self._clock()
            self.look()
            looked_s = self._clock() - began_s
            if self._regroup and self._clock() >= self._group_s:
                await self._group()
            await asyncio.sleep(max(LOOK_S, looked_s * (1 / LOOKING_SHARE - 1)))

    # Measuring.

    def look(self) -> None:
        """Ask for the measurements that are due now."""
        self._give_up_silent()
        self._ask()

    def _nodes(self) -> dict[str, MeasurableNode]:
        return {name: self._measurable(session) for name, session in self._sessions.connected.items()}

    def _measurable(self, session: AgentSession) -> MeasurableNode:
        record = session.record
        return MeasurableNode(
            name=record.name,
            island=record.island,
            host=record.host,
            dialled=session.links_port > 0,
            trains=bool(session.workers),
            local=_is_local(record.address),
            free_s=self._free_s.get(record.name, 0.0),
        )

    def _ask(self) -> None:
        nodes, now_s = self._nodes(), self._clock()
        known = frozenset((node.name, node.island) for node in nodes.values())
        if known != self._known:
            self._known = known
            self._queue.want(wanted_pairs(tuple(nodes.values())))
        for asked in self._queue.due(nodes, now_s):
            self._send(asked, now_s)

    def _send(self, asked: PairMeasurement, now_s: float) -> None:
        by, to = self._sessions.connected[asked.by], self._sessions.connected[asked.to]
        message = agents_pb2.MeasureLink(
            node=asked.to,
            address=to.record.address,
            port=to.links_port,
            key=node_key(to.links_secret, asked.by),
            relayed=_is_relayed(by.record, to.record),
            burst_s=asked.burst_s,
        )
        by.send(agents_pb2.ControllerMessage(measure_link=message))
        self._asked[asked.by] = (asked.to, now_s)
        for name in (asked.by, asked.to):
            self._free_s[name] = now_s + ANSWER_S

    def on_measured(self, session: AgentSession, report: agents_pb2.LinkMeasured) -> None:
        """Take over an agent's answer. One that was not asked for is dropped."""
        by, now_s = session.record.name, self._clock()
        asked = self._asked.get(by)
        if asked is None or asked[0] != report.node:
            return
        if report.trouble:
            self._end(by, report.busy_s, failed=True)
            self._trouble[by] = f"{report.node} could not be measured: {report.trouble}"
            logger.info("link from %s to %s: %s", by, report.node, report.trouble)
            return
        self._trouble.pop(by, None)
        unix_s, doubtful = time.time(), False
        for pair, bps in (((by, report.node), report.to_bps), ((report.node, by), report.from_bps)):
            readings = self._readings.setdefault(pair, deque(maxlen=READINGS))
            readings.append(PeerLink(rtt_s=report.rtt_s, bandwidth_bps=bps, measured_unix_s=unix_s))
            best_bps, least_s = max(one.bandwidth_bps for one in readings), min(one.rtt_s for one in readings)
            worst_bps = min(one.bandwidth_bps for one in readings)
            doubtful = doubtful or len(readings) < READINGS or best_bps > MAX_READING_RATIO * worst_bps
            link = PeerLink(rtt_s=least_s, bandwidth_bps=best_bps, measured_unix_s=unix_s)
            self._measured[pair] = self._sent[pair[0]][pair[1]] = link
        if len(self._measured) > MAX_LINKS:
            self._forget_gone()
        pair = pair_of(by, report.node)
        doubtful = doubtful and not self._queue.history.get(pair, PairHistory()).doubtful  # once
        self._queue.history[pair] = PairHistory(measured_s=now_s, doubtful=doubtful)
        self._end(by, report.busy_s, doubtful=doubtful)
        self._regroup = True
        self._changed()

    def _forget_gone(self) -> None:
        for name in {name for pair in self._measured for name in pair} - self._sessions.connected.keys():
            self._forget(name)

    def _trains(self, name: str) -> bool:
        session = self._sessions.connected.get(name)
        return session is not None and bool(session.workers)

    def _end(self, by: str, busy_s: float, *, failed: bool = False, doubtful: bool = False) -> None:
        """A measurement is over: both nodes rest, and a failure is noted. After a doubtful reading they rest for
        CONFIRM_S at most, and for the remainder after the next measurement."""
        to, began_s = self._asked.pop(by)
        now_s = self._clock()
        busy_s = min(busy_s, now_s - began_s)
        for name in (by, to):
            rations = self._trains(name) and not self._queue.is_new(name)
            due_s = rest_s(busy_s, trains=rations) + self._deferred_rest_s.pop(name, 0.0)
            pause_s = min(due_s, CONFIRM_S) if doubtful else due_s
            self._deferred_rest_s[name] = due_s - pause_s
            self._free_s[name] = now_s + pause_s
        if failed:
            pair = pair_of(by, to)
            past = self._queue.history.get(pair, PairHistory())
            self._queue.history[pair] = replace(past, failures=past.failures + 1, tried_s=now_s)

    def _give_up_silent(self) -> None:
        now_s = self._clock()
        for by, (to, began_s) in list(self._asked.items()):
            there = self._sessions.connected
            if by not in there or to not in there or now_s - began_s > ANSWER_S:
                self._end(by, 0.0, failed=True)

    # Islands.

    async def _group(self) -> None:
        self._regroup = False
        records, began_s = self._sessions.records(), self._clock()
        if not records:
            return
        plan = await asyncio.to_thread(self._plan, records, dict(self._measured), dict(self._placed))
        took_s = self._clock() - began_s
        self._group_s = self._clock() + max(GROUP_EVERY_S, took_s * (1 / GROUPING_SHARE - 1))
        try:
            await self._apply(plan)
        except StoreUnavailable as error:
            logger.warning("islands stay as they are: %s", error)
            self._regroup = True

    @staticmethod
    def _plan(
        records: dict[str, NodeRecord], measured: dict[Pair, PeerLink], placed: dict[str, NodeRecord]
    ) -> IslandsPlan:
        nodes = tuple(
            IslandNode(name=name, host=_host(record), nat=record.behind_nat, island=record.named_island)
            for name, record in sorted(records.items())
        )
        pairs = tuple(
            NodePair(from_node=a, to_node=b, rtt_s=link.rtt_s, bandwidth_bps=link.bandwidth_bps)
            for (a, b), link in sorted(measured.items())
            if a in records and b in records
        )
        previous = {
            name: one.island
            for name, one in sorted(placed.items())
            if name in records and one.island_reason and not one.named_island
        }
        return ISLANDS.plan(IslandsInput(nodes=nodes, pairs=pairs, previous=previous))

    async def _apply(self, plan: IslandsPlan) -> None:
        """Write the records of nodes whose island changed. Reasons alone stay in memory: they change with each
        measurement."""
        told = 0
        for island in plan.islands:
            for name in island.nodes:
                session = self._sessions.connected.get(name)
                if session is None:
                    continue
                before = session.record
                reason = island.reason if island.settled else ""
                record = replace(before, island=before.named_island or island.name, island_reason=reason)
                if record == before:
                    continue
                if record.island != before.island or bool(record.island_reason) != bool(before.island_reason):
                    await self._write(record)
                if (current := self._sessions.connected.get(name)) is not session:
                    if current is not None:  # it registered again meanwhile, and was written before this
                        await self._write(current.record)
                    continue
                session.record = self._placed[name] = record
                if record.island != before.island:
                    told += 1
                    self._changed()
                    if told <= MAX_CHANGES_TOLD:
                        cause = f"{record.island}, before {before.island}: {island.reason}"
                        self._tell(NewEvent(kind=EventKind.ISLAND_CHANGED, node=name, cause=cause))

    def links_of(self, node: str) -> Mapping[str, PeerLink]:
        """Return the newest measurements from a node, by the other node."""
        return self._sent.get(node, {})

    def unmeasured(self) -> frozenset[str]:
        """Return the nodes that joined just now and of which a pair is still to be measured. No run begins there
        before: it would take islands of which too little is known."""
        now_s = self._clock()
        new = {
            name
            for name, session in self._sessions.connected.items()
            if now_s - session.began_s < FIRST_MEASUREMENTS_S and not session.workers
        }
        if not new:
            return frozenset()
        return frozenset(
            name for name in new if self._queue.is_new(name) and not self._sessions.connected[name].record.named_island
        )

    def trouble_of(self, node: str) -> str:
        """Return why the newest measurement by this node failed; empty if it did not."""
        return self._trouble.get(node, "")


def _host(record: NodeRecord) -> str:
    """Nodes behind NAT share a host only where they share its address too: then they reach each other inside it."""
    return f"{record.host} {record.address}" if record.behind_nat and record.host else record.host


def _moved(before: NodeRecord, now: NodeRecord) -> bool:
    there = (before.address, before.host, before.behind_nat)
    return there != (now.address, now.host, now.behind_nat)


def _is_local(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _is_relayed(one: NodeRecord, other: NodeRecord) -> bool:
    """Return True if workers of both nodes reach each other through the relay."""
    together = one.named_island and one.named_island == other.named_island
    beside = one.host and (one.host, one.address) == (other.host, other.address)
    return (one.behind_nat or other.behind_nat) and not together and not beside
