"""The volunteers of a leader epoch: looks whom they could help, and sends what was decided of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

from atoll.controller.jobs.agents.outbox import AgentOutbox, launch_of_helper
from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.agents.sessions import AgentSession, AgentSessions
from atoll.controller.jobs.model.members import members_of
from atoll.controller.jobs.model.observed import ObservedWorker, WorkerPhase
from atoll.controller.jobs.model.supply import Edges, HelpedRank, LaunchHelper, MoveHelper
from atoll.controller.jobs.records.job_state import JobState
from atoll.controller.jobs.records.ledger import Ledger
from atoll.controller.jobs.volunteers.helping import DRAWS, HelpedRuns, device_of, helper_number, helping_actions
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import JobPhase, Level, WorkerExitKind
from atoll.jobs.worker_key import WorkerKey
from atoll.strategies import registry

REST_S: Final = 1.0
"""Seconds before a new helper after an exit without a fault."""
LONGEST_REST_S: Final = 300.0
SETTLED_S: Final = 60.0
"""Seconds without a change of a run's helpers before one may move."""
PER_POWER: Final = "per_power"
"""Metric of a rank: what it measures of its helpers."""
_HELPED: Final = {JobPhase.STARTING, JobPhase.RUNNING}
_ASKED: Final = {WorkerExitKind.DRAINED, WorkerExitKind.STOPPED}
_FAILURES: Final = {WorkerExitKind.FAILED, WorkerExitKind.NOT_STARTED, WorkerExitKind.UNRESPONSIVE}


class Volunteers:
    """tell: has an event of the cluster written."""

    def __init__(
        self,
        ledger: Ledger,
        sessions: AgentSessions,
        outbox: AgentOutbox,
        progress: ProgressBoard,
        tell: Callable[[NewEvent], None],
    ) -> None:
        self._ledger, self._sessions, self._outbox = ledger, sessions, outbox
        self._progress, self._tell = progress, tell
        self._changed_s: dict[tuple[str, int], float] = {}  # by job and run, when its helpers did
        self._edges: dict[tuple[str, int, str], Edges] = {}  # of (node, device, job), as measured last
        self._judged: dict[tuple[str, WorkerKey], int] = {}  # how many measurements of a helper
        self._helpers: dict[tuple[str, int], frozenset[tuple[str, int]]] = {}  # who they were then: node, number
        self._noted: set[tuple[str, WorkerKey]] = set()
        self._failures: dict[tuple[str, int, str], int] = {}
        self._rests_until_s: dict[tuple[str, int, str], float] = {}

    def attend(self, now_s: float) -> None:
        """Have every volunteer do what it should."""
        sessions = self._sessions.volunteers
        if not sessions:
            return
        self._note_ends(sessions, now_s)
        self._rests_until_s = {who: until_s for who, until_s in self._rests_until_s.items() if until_s > now_s}
        nodes = self._sessions.nodes_named(sessions)
        runs = self._helped_runs()
        settled = self._settled(runs, sessions, now_s)
        fresh = self._take_edges(sessions)
        for action in helping_actions(
            nodes.values(), runs, self._rests_until_s, settled=settled, edges=self._edges, fresh=fresh
        ):
            match action:
                case LaunchHelper():
                    self._launch(sessions[action.node], action, now_s)
                case MoveHelper():
                    self._outbox.act(None, action.stop, now_s)
                    self._changed_s[action.stop.job, action.stop.run] = now_s
                    text = f"volunteer {action.node}/{action.device} of {action.stop.job} moves: {action.stop.reason}"
                    self._tell(NewEvent(kind=EventKind.NODE, node=action.node, cause=text))
                case _:
                    self._outbox.act(None, action, now_s)

    def _take_edges(self, sessions: dict[str, AgentSession]) -> dict[tuple[str, WorkerKey], int]:
        """Take the helpers' measurements. Return the helpers that measured since the last call, and how often so
        far."""
        told = {(name, key): measured for name, session in sessions.items() for key, measured in session.edges.items()}
        for (name, key), measured in told.items():
            self._edges[name, device_of(key.rank), key.job] = measured.edges
        self._edges = {who: edges for who, edges in self._edges.items() if who[2] in self._ledger.jobs}
        times = {who: measured.times for who, measured in told.items()}
        fresh = {who: count for who, count in times.items() if count > self._judged.get(who, 0)}
        self._judged = times
        return fresh

    def _settled(self, runs: HelpedRuns, sessions: dict[str, AgentSession], now_s: float) -> frozenset[tuple[str, int]]:
        """Runs whose helpers are the same for SETTLED_S."""
        for one in runs:
            here = frozenset(
                (name, key.rank)
                for name, session in sessions.items()
                for key, worker in session.workers.items()
                if (key.job, key.run) == one and worker.phase is not WorkerPhase.EXITED
            )
            if self._helpers.get(one) != here:
                self._helpers[one], self._changed_s[one] = here, now_s
        for one in self._helpers.keys() - runs.keys():
            del self._helpers[one], self._changed_s[one]
        return frozenset(one for one in runs if now_s >= self._changed_s[one] + SETTLED_S)

    def _helped_runs(self) -> HelpedRuns:
        running = [s for s in self._ledger.jobs.values() if s.job.status.phase in _HELPED]
        running.sort(key=lambda state: state.created)
        return {
            (state.job.id, state.run.run): self._helped_ranks(state)
            for state in running
            if state.run is not None and registry.find(state.strategy).volunteer
        }

    def _helped_ranks(self, state: JobState) -> list[HelpedRank]:
        """None before all of them are known: the first would have everybody's help."""
        run, found = state.run, []
        if run is None:
            return []
        progress = self._progress.of(run.job, run.run)
        for member in members_of(run, state.views[-1] if state.views else None):
            session = self._sessions.connected.get(member.node)
            status = self._sessions.status(member.node, WorkerKey(run.job, run.run, member.rank))
            if member.exit is None:
                if session is None or status is None or not status.volunteer_port:
                    return []
                position = progress.positions.get(member.rank, -1) if progress is not None else -1
                seen = progress.ranks.get(position) if progress is not None else None
                found.append(
                    HelpedRank(
                        member.rank,
                        session.record.address,
                        status.volunteer_port,
                        next((one.speed for one in session.record.devices if one.index == member.device), 1.0),
                        seen.last.strategy_metrics.get(PER_POWER, 0.0) if seen is not None and seen.last else 0.0,
                    )
                )
        return found

    def _launch(self, session: AgentSession, action: LaunchHelper, now_s: float) -> None:
        state = self._ledger.jobs[action.job]
        assert state.run is not None
        number = helper_number(action.device, action.helps.rank, secrets.randbelow(DRAWS))
        message = partial(launch_of_helper, state.job, state.run, action, number)
        session.send_unless_recent(("helper", action.device, action.job, action.run), message, now_s)

    def _note_ends(self, sessions: dict[str, AgentSession], now_s: float) -> None:
        """A device whose helper failed rests before it tries again, longer each time."""
        ended = {
            (name, key): worker
            for name, session in sessions.items()
            for key, worker in session.workers.items()
            if worker.phase is WorkerPhase.EXITED
        }
        for name, key in ended.keys() - self._noted:
            self._note_end(name, key, ended[name, key], now_s)
        self._noted = set(ended)

    def _note_end(self, node: str, key: WorkerKey, worker: ObservedWorker, now_s: float) -> None:
        who, exit = (node, device_of(key.rank), key.job), worker.exit
        if exit is None or exit.kind not in _FAILURES:
            self._failures.pop(who, None)
            if exit is not None and exit.kind not in _ASKED:
                self._rests_until_s[who] = now_s + REST_S
            return
        failures = self._failures[who] = self._failures.get(who, 0) + 1
        rest_s = min(LONGEST_REST_S, 2.0**failures)
        self._rests_until_s[who] = now_s + rest_s
        text = f"volunteer {node}/{who[1]} could not help {key.job}: {exit.reason}; it tries again in {rest_s:.0f} s"
        self._tell(NewEvent(kind=EventKind.NODE, level=Level.WARNING, node=node, cause=text))
