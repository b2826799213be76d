"""Messages to agents: each order of a pass as what its node is sent, made once where many are sent the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import islice

from atoll.controller.jobs.agents.sessions import AgentSessions
from atoll.controller.jobs.lifecycle.observed import (
    Action,
    DropMemory,
    ForgetWorker,
    LaunchWorkers,
    SendPlan,
    SendView,
    StopRun,
)
from atoll.controller.jobs.records import wire, wire_views
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.state.records import NodeRecord, RunRecord
from atoll.network.message_limits import MAX_HOLDERS

logger = logging.getLogger(__name__)


class Dispatch:
    """Of one leader epoch. reveal: agents may be told the secrets of jobs."""

    def __init__(self, sessions: AgentSessions, *, reveal: bool) -> None:
        self._sessions = sessions
        self._reveal = reveal
        self._last_launch: tuple[tuple[str, int], bytes, list[str]] | None = None
        self._last_plan: tuple[tuple[str, int, int], bytes] | None = None
        self._last_view: tuple[tuple[str, int, int, int], bytes] | None = None

    def act(self, state: JobState | None, action: Action, now_s: float) -> None:
        """Send an order, unless its node is away or was sent it just now. state: of its job, where it has one."""
        session = self._sessions.connected.get(action.node)
        if session is None:
            return
        match action:
            case StopRun():
                session.send_unless_recent(replace(action, reason=""), lambda: wire.stop(action), now_s)
            case ForgetWorker():
                session.send_unless_recent(action, lambda: wire.forget(action), now_s)
            case DropMemory():
                session.send_unless_recent(action, lambda: wire.drop_memory(action), now_s)
            case LaunchWorkers(joins=True) if state and state.run and state.plans and state.views:
                known, [rank] = _views_of(state, state.run), action.ranks
                job, reveal = state.job, self._reveal
                session.send_unless_recent(
                    action, lambda: wire_views.launch_to_join(job, known, rank, reveal=reveal), now_s
                )
            case LaunchWorkers() if state and state.run and state.plans:
                run, (common, holders) = state.run, self._common_launch(state, state.run)
                for holder in holders:
                    if other := self._sessions.connected.get(holder):
                        topic = ("serve shards", run.job, run.run)
                        other.send_unless_recent(topic, lambda: wire.serve_shards(run), now_s)
                session.send_unless_recent(action, lambda: wire.launch(common, run, action.ranks), now_s)
            case SendPlan() if state:
                session.plans_sent[action.job, action.run] = action.plan
                session.send(self._plan_message(state, action))
            case SendView() if state and state.run and state.plans:
                session.views_sent[action.job, action.run] = (action.view, action.in_force)
                message = self._view_message(state, state.run, action)
                session.send_unless_recent(action, lambda: message, now_s)
            case _:
                logger.error("job %s has no plan to launch %s with", state and state.job.id, action)

    def _common_launch(self, state: JobState, run: RunRecord) -> tuple[bytes, list[str]]:
        """What all launches of the run carry, serialised, and the nodes outside of it that it names."""
        key = (run.job, run.run)
        if self._last_launch is None or self._last_launch[0] != key:
            outside = self._outside(run)
            common = wire.launch_of_all(
                state.job, run, state.plans[0], state.placement, outside=outside, reveal=self._reveal
            )
            self._last_launch = (key, common, [node.name for node in outside])
        return self._last_launch[1:]

    def _outside(self, run: RunRecord) -> list[NodeRecord]:
        """Nodes with shards of the job in memory and no part in the run, that serve them."""
        nodes = {member.node for member in run.members}
        there = (
            session.record
            for name, session in sorted(self._sessions.connected.items())
            if run.data_seed and run.job in session.memory_jobs and name not in nodes and session.record.shards_port
        )
        return list(islice(there, MAX_HOLDERS))

    def _view_message(self, state: JobState, run: RunRecord, action: SendView) -> bytes:
        """Made once for all nodes, as plans are."""
        key = (action.job, action.run, action.view, action.in_force)
        if self._last_view is None or self._last_view[0] != key:
            self._last_view = (key, wire_views.newest_view(_views_of(state, run)))
        return self._last_view[1]

    def _plan_message(self, state: JobState, action: SendPlan) -> bytes:
        """Made once for all nodes: a plan for a thousand ranks has a thousand shares."""
        key = (action.job, action.run, action.plan)
        if self._last_plan is None or self._last_plan[0] != key:
            plan = next(p for p in state.plans if p.id == action.plan)
            self._last_plan = (key, wire.plan_for_job(action.job, plan))
        return self._last_plan[1]


def _views_of(state: JobState, run: RunRecord) -> wire_views.RunViews:
    return wire_views.RunViews(run=run, views=state.views, plans=state.plans, placement=state.placement)
