"""AgentService: the agents' streams. Thin: checks sizes and fields, passes on to sessions, progress, logs, curves."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from typing import Final

from atoll.controller.jobs.agents.sessions import RESEND_S, AgentSession, DeviceTaken, NameTaken
from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.jobs.records import wire
from atoll.controller.services.checks import (
    check_inventory,
    check_link_measured,
    check_log,
    check_register,
    check_statuses,
    check_strategy_message,
    check_telemetry,
)
from atoll.controller.services.curves import CurveStore
from atoll.controller.services.gate import AGENT_ROLES, Context, KnownLeader, WrongToken, caller_identity
from atoll.controller.services.logs import LogStore, run
from atoll.controller.state.events import EventKind, NewEvent
from atoll.controller.state.records import Level
from atoll.errors import BadInput, DeadlineExceeded, NotAllowed, StoreUnavailable
from atoll.security.volunteer_ticket import is_token
from atoll.strategies import registry
from atoll.strategies.declaration import read
from atoll.v1 import agents_pb2 as pb
from atoll.v1 import common_pb2
from atoll.v1.agents_pb2_grpc import AgentServiceServicer

logger = logging.getLogger(__name__)

REGISTER_DEADLINE_S: Final = 10.0
SKEW_S: Final = 30.0
SIDE_END_S: Final = 2.0
_PULSE: Final = pb.ControllerMessage(pulse=pb.Pulse()).SerializeToString()


class AgentServicer(AgentServiceServicer):
    """token: what agents must present, None where nothing is asked. identities: whether they have certificates."""

    def __init__(
        self,
        known_leader: KnownLeader,
        logs: LogStore,
        curves: CurveStore,
        disk: Executor,
        *,
        token: str | None,
        identities: bool,
    ) -> None:
        self._known_leader = known_leader
        self._logs, self._curves, self._disk = logs, curves, disk
        self._token = token
        self._identities = identities
        self._warned: set[tuple[str, str]] = set()
        self._full = False

    async def Connect(self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context) -> None:  # type: ignore[override]
        epoch = self._known_leader.leading()
        messages = aiter(request_iterator)
        register = await self._registration(messages, context)
        node = wire.node_from_wire(register)
        try:
            session = await epoch.join(register.session, node)
        except (NameTaken, DeviceTaken) as error:
            self._warn(epoch, "name" if isinstance(error, NameTaken) else "device", register.name, str(error))
            raise
        session.links_port, session.links_secret = register.links_port, register.links_secret
        session.report(register.workers, register.rendezvous_ports, register.memory_jobs)
        self._warn_of_skew(epoch, register)
        logger.info("agent %s joined from %s", node.name, context.peer())
        settings = epoch.settings
        session.send(
            pb.ControllerMessage(
                registered=pb.Registered(
                    controller=settings.controller,
                    heartbeat_s=settings.heartbeat_s,
                    lease_s=settings.node_lease_s,
                    pulse_s=RESEND_S + settings.heartbeat_s,
                )
            )
        )
        epoch.send_relay_access(session)
        epoch.nudge()
        await self._serve(epoch, session, messages, context)

    async def _serve(
        self, epoch: LeaderEpoch, session: AgentSession, messages: AsyncIterator[pb.AgentMessage], context: Context
    ) -> None:
        """Both directions until either ends. Raises why the controller ended it."""
        sides = [
            asyncio.create_task(self._listen(epoch, session, messages), name=f"listen-{session.record.name}"),
            asyncio.create_task(_talk(session, context), name=f"talk-{session.record.name}"),
            asyncio.create_task(self._write_down(epoch, session), name=f"logs-{session.record.name}"),
        ]
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        finally:
            epoch.sessions.leave(session)  # first: what follows waits for gRPC, and the node is gone now
            for side in sides:
                side.cancel()
            _, stuck = await asyncio.wait(sides, timeout=SIDE_END_S)
            logger.info("agent %s left", session.record.name)
            if stuck:
                logger.warning("%s did not end within %.0f s", ", ".join(s.get_name() for s in stuck), SIDE_END_S)
        for side in sides:
            if side.done() and not side.cancelled() and (error := side.exception()) is not None:
                raise error
        if session.why is not None:
            raise session.why

    async def _registration(self, messages: AsyncIterator[pb.AgentMessage], context: Context) -> pb.Register:
        """The first message, checked: well formed, of this certificate, with the token."""
        try:
            async with asyncio.timeout(REGISTER_DEADLINE_S):
                first = await anext(messages, None)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no Register came within {REGISTER_DEADLINE_S:.0f} s") from error
        if first is None or first.WhichOneof("body") != "register":
            raise BadInput("the first message of an agent must be Register")
        register = first.register
        check_register(register)
        if self._identities:
            self._check_identity(register, *caller_identity(context, *AGENT_ROLES))
        if self._token is not None:
            self._check_token(register, self._token)
        return register

    @staticmethod
    def _check_identity(register: pb.Register, role: str, name: str) -> None:
        if name != register.name:
            raise NotAllowed(
                f"the certificate is of {role} {name!r}, it may not register as {register.name!r}. "
                f"Start the agent with --name {name}, or make it a certificate of its own"
            )
        if role == "volunteer" and not register.volunteer:
            raise NotAllowed(f"the certificate of {name!r} is a volunteer's. Start the agent with --volunteer")

    @staticmethod
    def _check_token(register: pb.Register, join_token: str) -> None:
        """The cluster's lets a node join as what it likes, a volunteer's that node as a volunteer."""
        if hmac.compare_digest(register.token.encode(), join_token.encode()):
            return
        of_volunteer = is_token(join_token, register.name, register.token)
        if of_volunteer and register.volunteer:
            return
        if of_volunteer:
            raise WrongToken("the join token is a volunteer's. Start the agent with --volunteer")
        whose = f"that `atoll certs volunteer` made for {register.name}" if register.volunteer else "the controller's"
        raise WrongToken(f"the join token is wrong. Give the agent {whose} with --token-file")

    async def _listen(
        self, epoch: LeaderEpoch, session: AgentSession, messages: AsyncIterator[pb.AgentMessage]
    ) -> None:
        async for message in messages:
            session.last_message_s = time.monotonic()
            match message.WhichOneof("body"):
                case "heartbeat":
                    beat = message.heartbeat
                    check_statuses(beat.workers, beat.rendezvous_ports, beat.memory_jobs)
                    session.send_unless_recent("pulse", lambda: _PULSE, time.monotonic())
                    if session.report(beat.workers, beat.rendezvous_ports, beat.memory_jobs):
                        epoch.nudge()
                case "telemetry":
                    check_telemetry(message.telemetry)
                    session.sampled(message.telemetry.devices)
                    for sums in message.telemetry.sums:
                        epoch.progress.observe_sums(session.record.name, sums)
                    for worker in message.telemetry.workers:
                        session.measured(worker)
                        if not _may_speak_for(epoch, session, worker.id):
                            continue
                        if epoch.progress.observe(worker):
                            epoch.nudge()
                        new = epoch.progress.report(worker)
                        if new is not None and not session.output.full():
                            session.output.put_nowait((worker.id, new))
                case "inventory":
                    check_inventory(message.inventory)
                    session.inventory_taken(message.inventory)
                case "strategy":
                    check_strategy_message(message.strategy)
                    answer_strategy(epoch, session, message.strategy, time.monotonic())
                case "link":
                    check_link_measured(message.link)
                    epoch.links.on_measured(session, message.link)
                case "log":
                    check_log(message.log)
                    if not session.output.full():  # else the agent repeats it
                        session.output.put_nowait(message.log)
                case _:
                    raise BadInput(
                        "an agent's messages are Register once, then Heartbeat, Telemetry, LogBatch, Inventory, Link"
                    )

    async def _write_down(self, epoch: LeaderEpoch, session: AgentSession) -> None:
        """Keep what came, one batch after the other. Beside `_listen`: no heartbeat waits for a disk."""
        while True:
            match await session.output.get():
                case pb.LogBatch() as batch:
                    await self._keep(epoch, session, batch)
                case worker, new:
                    await self._keep_reported(epoch, worker, new.points())

    async def _keep(self, epoch: LeaderEpoch, session: AgentSession, batch: pb.LogBatch) -> None:
        """Write output down, then acknowledge it. What cannot be written stays with the agent, which repeats it."""
        try:
            own = _may_speak_for(epoch, session, batch.id) or await _spoke_for(epoch, session, batch.id)
        except StoreUnavailable as error:
            logger.warning("%s; %s repeats its output", error, session.record.name)
            return
        if not own:
            kept = batch.offset + len(batch.data)  # of a job that was removed, or not this node's: nobody asks for it
        else:
            try:
                kept = await run(self._disk, self._append, batch)
                self._full = False
            except OSError as error:
                self._cannot_keep(epoch, "logs of workers", error)
                return
        session.send(pb.ControllerMessage(log_ack=pb.LogAck(id=batch.id, offset=kept)))

    async def _keep_reported(
        self, epoch: LeaderEpoch, worker: common_pb2.WorkerId, points: Sequence[common_pb2.Metrics]
    ) -> None:
        """Store what a run's scripts reported; if that fails, the curves have a gap."""
        try:
            await run(self._disk, self._curves.add, worker.job, worker.run, time.time(), points)
        except OSError as error:
            self._cannot_keep(epoch, "curves", error)

    def _cannot_keep(self, epoch: LeaderEpoch, what: str, error: OSError) -> None:
        """An event, once until logs can be written again."""
        if not self._full:
            self._full = True
            logger.error("%s cannot be kept: %s. Free space on the controller's disk", what, error)
            text = f"{what} cannot be kept: {error.strerror or error}. Free space on the controller's disk"
            epoch.reconciler.add_cluster_event(NewEvent(kind=EventKind.NOTICE, level=Level.ERROR, cause=text))

    def _append(self, batch: pb.LogBatch) -> int:
        return self._logs.rank(batch.id.job, batch.id.rank).append(batch.id.run, batch.offset, batch.data)

    def _warn_of_skew(self, epoch: LeaderEpoch, register: pb.Register) -> None:
        skew_s = register.unix_s - time.time()
        if abs(skew_s) > SKEW_S:
            where = "ahead of" if skew_s > 0 else "behind"
            text = f"node {register.name}'s clock is {abs(skew_s):.0f} s {where} the controller's. Start NTP there"
            self._warn(epoch, register.session, register.name, f"{text}; training does not depend on it")

    def _warn(self, epoch: LeaderEpoch, kind: str, node: str, text: str) -> None:
        """An event of the cluster, once for each cause: agents come back every second."""
        if (kind, node) not in self._warned and len(self._warned) < 1024:
            self._warned.add((kind, node))
            epoch.reconciler.add_cluster_event(
                NewEvent(kind=EventKind.NODE, level=Level.WARNING, node=node, cause=text)
            )
            epoch.nudge()

    async def FetchCode(self, request: pb.FetchCodeRequest, context: Context) -> None:  # type: ignore[override]
        epoch = self._known_leader.leading()
        if self._identities and caller_identity(context, *AGENT_ROLES)[0] == "volunteer":
            _refuse_unhelped(epoch, request.sha256)
        for chunk in await epoch.code.chunks(request.sha256):
            await context.write(pb.CodeChunk(data=chunk))


def _refuse_unhelped(epoch: LeaderEpoch, sha256: str) -> None:
    """Raises NotAllowed for code of no job that takes volunteers' help now."""
    for state in epoch.ledger.jobs.values():
        spec = state.job.spec
        if spec.code_sha256 == sha256 and state.job.status.phase.active and registry.find(state.strategy).volunteer:
            return
    raise NotAllowed("volunteers get the code of jobs that they help, and of no others")


def _may_speak_for(epoch: LeaderEpoch, session: AgentSession, worker: common_pb2.WorkerId) -> bool:
    """Return True if the worker is one of this node's in its job's newest run."""
    state = epoch.ledger.jobs.get(worker.job)
    if state is None or state.run is None or worker.run != state.run.run:
        return False
    members = state.run.members
    return worker.rank < len(members) and members[worker.rank].node == session.record.name


async def _spoke_for(epoch: LeaderEpoch, session: AgentSession, worker: common_pb2.WorkerId) -> bool:
    """Return True if the worker was one of this node's in an older run of its job. Raises StoreUnavailable."""
    state = epoch.ledger.jobs.get(worker.job)
    if state is None or state.run is None or not 0 < worker.run < state.run.run:
        return False
    nodes = await epoch.ledger.nodes_of(worker.job, worker.run)
    return worker.rank < len(nodes) and nodes[worker.rank] == session.record.name


def answer_strategy(
    epoch: LeaderEpoch, session: AgentSession, message: common_pb2.StrategyMessage, now_s: float
) -> None:
    """Pass a worker's message to its strategy's estimator and scheduler. Drop one of an older run, or that is none."""
    state = epoch.ledger.jobs.get(message.id.job)
    if state is None or state.run is None or not _may_speak_for(epoch, session, message.id):
        return
    strategy, rank = registry.find(state.strategy), message.id.rank
    if strategy.message is None:
        return
    try:
        received = read(strategy.message, message.body, f"message of strategy {strategy.name}")
    except BadInput as error:
        logger.warning("%s run %d rank %d: dropped: %s", state.job.id, state.run.run, rank, error)
        return
    epoch.progress.on_message(state.job.id, state.run.run, rank, received)
    for node, answer in epoch.relay.answers(state, rank, received, now_s):
        epoch.sessions.send(node, answer)


async def _talk(session: AgentSession, context: Context) -> None:
    while (message := await session.next_message()) is not None:
        await context.write(message)
