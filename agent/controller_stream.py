"""The agent's stream to the controller that leads: found, kept, and made anew for ever. No worker depends on it."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import grpc
import grpc.aio

from atoll.agent import incoming, reports
from atoll.agent.address import local_address
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.supervisor.shell import Supervisor
from atoll.agent.telemetry.devices import Device
from atoll.errors import AtollError, BadInput, Conflict, ControllerUnreachable, NotAllowed
from atoll.network.rpc import CODE_CHUNK_BYTES, controller_errors, leader_hint, open_channel, split_address, translate
from atoll.security.handshakes import certificate_problem, ended_at_once, refused_in_silence
from atoll.v1.agents_pb2 import (
    AgentMessage,
    ControllerMessage,
    FetchCodeRequest,
    Heartbeat,
    Launch,
    Registered,
    Telemetry,
)
from atoll.v1.agents_pb2_grpc import AgentServiceStub
from atoll.v1.common_pb2 import DeviceSample

logger = logging.getLogger(__name__)

REGISTER_DEADLINE_S: Final = 10.0
TAKEN_S: Final = 10.0
"""A live agent of our name, or with our GPUs, may be our own predecessor, whose lease still runs. After this it is
somebody else."""
BACKOFF_CAP_S: Final = 2.0
TELEMETRY_S: Final = 1.0
_BACKOFF_S: Final = 0.1
_PACE_S: Final = 0.025  # between heartbeats, however fast workers change; between pieces of output: 5 MiB a second
_FETCH_DEADLINE_S: Final = 30.0
_PULSES_MISSED: Final = 1.5
"""A controller that promised to say something and did not for so many times that long stands still, or is gone."""

Call: TypeAlias = grpc.aio.StreamStreamCall[AgentMessage, ControllerMessage]


class StreamEnded(ControllerUnreachable):
    """The controller ended the stream without an error: it stops, or another one leads."""


@dataclass(slots=True)
class PendingReports:
    """Pending reports to the controller. Set from the event loop."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    all_sent: asyncio.Event = field(default_factory=asyncio.Event)
    """The controller was told all there was to tell."""
    changed: bool = False

    def worker_changed(self) -> None:
        self.changed = True
        self.output_came()

    def output_came(self) -> None:
        self.all_sent.clear()
        self.woken.set()


class ControllerStream:
    """Dials, registers, reports and obeys. `run` ends only by cancelling, or by a refusal that is for good."""

    def __init__(
        self,
        settings: AgentSettings,
        devices: Sequence[Device],
        pending: PendingReports,
        samples: Callable[[], Sequence[DeviceSample]],
    ) -> None:
        """samples: what the devices said of themselves since it was last called, newest."""
        self._settings = settings
        self._devices = devices
        self._samples = samples
        self._pending = pending
        self._session = secrets.token_hex(8)
        self._writing = asyncio.Lock()
        self._next_controller = 0
        self._hint: str | None = None
        self._failures = 0
        self._refused_since_s: float | None = None
        self._lease_s: float | None = None
        self._channel: grpc.aio.Channel | None = None
        self._problem = ""
        self._address = ""  # of the controller that the stream is with

    async def fetch_code(self, sha256: str) -> AsyncIterator[bytes]:
        """The bytes of a bundle, in pieces. Raises ControllerUnreachable when there is no stream, other AtollErrors."""
        if self._channel is None:
            raise ControllerUnreachable("no controller is connected")
        with controller_errors(f"fetching code {sha256[:8]}", ", ".join(self._settings.controllers)):
            call = AgentServiceStub(self._channel).FetchCode(FetchCodeRequest(sha256=sha256), timeout=_FETCH_DEADLINE_S)
            async for chunk in call:
                if len(chunk.data) > CODE_CHUNK_BYTES:
                    raise BadInput(f"a piece of code {sha256[:8]} has {len(chunk.data)} bytes")
                yield chunk.data

    @property
    def connected(self) -> bool:
        """Return True if the leading controller has registered this agent."""
        return self._channel is not None

    async def flush(self, deadline_s: float) -> None:
        """Wait until a controller that is there was told everything."""
        if self._channel is not None:
            await _wait_until(self._pending.all_sent, time.monotonic() + deadline_s)

    async def run(self, supervisor: Supervisor) -> None:
        """Raises NotAllowed (token, certificate) and BadInput (a controller of another version) if it is refused before
        any controller has let it in, Conflict (name)."""
        while True:
            address = self._choose()
            try:
                await self._connect(address, supervisor)
            except (AtollError, grpc.aio.AioRpcError, OSError, TimeoutError) as error:
                self._judge(error, address)
            await asyncio.sleep(self._backoff_s())

    def _choose(self) -> str:
        """The leader, where somebody named it, else each controller in turn."""
        if self._hint is not None:
            address, self._hint = self._hint, None
            return address
        address = self._settings.controllers[self._next_controller % len(self._settings.controllers)]
        self._next_controller += 1
        return address

    def _backoff_s(self) -> float:
        """Jittered, so that a thousand agents do not come back at one moment."""
        longest_s = min(BACKOFF_CAP_S, _BACKOFF_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        return random.uniform(0.5, 1.0) * longest_s

    def _judge(self, error: Exception, address: str) -> None:
        """Raise what no second try changes; remember a leader that was named; say the rest once."""
        code: grpc.StatusCode | None = None
        if isinstance(error, grpc.aio.AioRpcError):
            code = error.code()
            self._take_hint(leader_hint(error), address)
            error = self._in_words(error, address)
        if isinstance(error, NotAllowed) and self._lease_s is None:
            raise error  # later it is the controller that was started with another token: workers go on meanwhile
        if code is grpc.StatusCode.ALREADY_EXISTS:
            self._judge_taken(error)
        else:
            self._refused_since_s = None
        if code is grpc.StatusCode.INVALID_ARGUMENT and self._lease_s is None:
            raise error  # it takes no Register of ours: another version
        problem = f"no controller: {error}. Trying again for ever; workers go on"
        logger.log(logging.DEBUG if problem == self._problem else logging.WARNING, "%s", problem)
        self._problem = problem

    def _in_words(self, error: grpc.aio.AioRpcError, address: str) -> AtollError:
        doing, details = f"registering {self._settings.name!r} at {address}", error.details() or ""
        if why := certificate_problem(details):
            return ControllerUnreachable(f"{doing}: {why}")
        if ended_at_once(details):
            return ControllerUnreachable(f"{doing}: it {refused_in_silence(self._settings.tls)}")
        return translate(error, doing, address)

    def _take_hint(self, hint: str | None, refused_by: str) -> None:
        if hint is None or hint == refused_by:
            return
        try:
            split_address(hint)
        except BadInput:
            logger.warning("%s names %r as the leader, which is no address", refused_by, hint[:100])
            return
        self._hint = hint
        self._failures = min(self._failures, 2)  # a known leader is worth asking soon; a wrong one costs 0.4 s a turn

    def _judge_taken(self, error: Exception) -> None:
        now_s = time.monotonic()
        self._refused_since_s = self._refused_since_s or now_s
        patience_s = TAKEN_S if self._lease_s is None else max(TAKEN_S, 2 * self._lease_s)
        if now_s - self._refused_since_s >= patience_s:
            raise Conflict(f"refused for {patience_s:.0f} s now: {error}") from error

    async def _connect(self, address: str, supervisor: Supervisor) -> None:
        """One stream, from its first to its last message. Always raises."""
        supervisor.address = await local_address(self._settings.address, address)
        supervisor.shards.listen(supervisor.address)
        if not self._settings.volunteer:  # others need not dial it
            supervisor.links.listen(supervisor.address)
        channel = open_channel(address, self._settings.tls)
        self._address = address
        call: Call | None = None
        try:
            call = AgentServiceStub(channel).Connect()
            registered = await self._register(call, supervisor)
            self._channel, self._failures, self._refused_since_s, self._problem = channel, 0, None, ""
            self._lease_s = registered.lease_s
            logger.info("registered with %s as %s", registered.controller or address, self._settings.name)
            supervisor.registered()
            await self._converse(call, supervisor, registered)
        finally:
            self._channel = None
            if call is not None:
                call.cancel()
            await channel.close()

    async def _register(self, call: Call, supervisor: Supervisor) -> Registered:
        message = reports.register(
            self._settings,
            self._session,
            address=supervisor.address,
            devices=self._devices,
            ports=supervisor.ports.held,
            workers=supervisor.workers,
            memory=supervisor.memory,
            shards=supervisor.shards,
            links=supervisor.links,
        )
        async with asyncio.timeout(REGISTER_DEADLINE_S):
            with suppress(asyncio.InvalidStateError):  # the stream is over: reading says why
                await call.write(AgentMessage(register=message))
            answer = await call.read()
        if answer is grpc.aio.EOF or not isinstance(answer, ControllerMessage):
            raise await _why_ended(call)
        if not answer.HasField("registered"):
            raise ControllerUnreachable(f"it answered Register with {answer.WhichOneof('body')}")
        try:
            incoming.check_registered(answer.registered)
        except BadInput as error:
            raise ControllerUnreachable(f"it answered Register with nonsense: {error}") from error
        return answer.registered

    async def _converse(self, call: Call, supervisor: Supervisor, registered: Registered) -> None:
        speaking = asyncio.create_task(self._speak(call, supervisor, registered), name="controller stream: speak")
        hearing = asyncio.create_task(self._hear(call, supervisor, registered.pulse_s), name="controller stream: hear")
        relaying = asyncio.create_task(
            self._relay(call, supervisor, registered.lease_s), name="controller stream: relay"
        )
        sides = (hearing, speaking, relaying)
        try:
            await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():  # a broken stream is explained to the one who hears
                await asyncio.wait((hearing,), timeout=0.5)
            for task in sides:
                if task.done():
                    task.result()
        finally:
            for task in sides:
                task.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _hear(self, call: Call, supervisor: Supervisor, pulse_s: float) -> None:
        silence_s = _PULSES_MISSED * pulse_s or None
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    message = await call.read()
            except TimeoutError as error:
                raise ControllerUnreachable(f"it said nothing for {silence_s:g} s") from error
            if message is grpc.aio.EOF or not isinstance(message, ControllerMessage):
                raise await _why_ended(call)
            try:
                self._obey(message, supervisor)
            except BadInput as error:
                logger.warning("the controller sent a message that makes no sense, ignored: %s", error)

    def _obey(self, message: ControllerMessage, supervisor: Supervisor) -> None:
        match message.WhichOneof("body"):
            case "launch":
                for launch in incoming.each_worker(message.launch):
                    self._launch(launch, supervisor)
            case "plan":
                incoming.check_plan_for_job(message.plan)
                supervisor.plan(message.plan)
            case "view":
                incoming.check_view(message.view)
                supervisor.view(message.view)
            case "stop":
                incoming.check_stop(message.stop)
                supervisor.stop(message.stop)
            case "forget":
                supervisor.forget(incoming.check_key(message.forget.id))
            case "drop_memory":
                incoming.check_job("drop_memory.job", message.drop_memory.job)
                supervisor.drop_memory(message.drop_memory.job)
            case "serve_shards":
                incoming.check_serve_shards(message.serve_shards)
                asked = message.serve_shards
                supervisor.shards.allow(asked.job, asked.run, asked.public)
            case "take_inventory":
                incoming.check_take_inventory(message.take_inventory)
                supervisor.take_inventory(message.take_inventory)
            case "use_relay":
                supervisor.passages.use(incoming.relay_access(message.use_relay, self._address))
            case "measure_link":
                incoming.check_measure_link(message.measure_link)
                supervisor.links.measure(message.measure_link)
            case "log_ack":
                incoming.check_key(message.log_ack.id)
                supervisor.logs.ack(message.log_ack)
            case "strategy":
                supervisor.strategy_message(incoming.check_strategy_message(message.strategy), message.strategy)
            case "pulse":
                pass
            case body:
                raise BadInput(f"body = {body!r} is not for a registered agent")

    def _launch(self, launch: Launch, supervisor: Supervisor) -> None:
        key = incoming.check_key(launch.id)
        try:
            incoming.check_launch(launch, [device.index for device in self._devices])
        except BadInput as error:
            supervisor.refuse(key, f"the launch makes no sense: {error}")
            raise
        supervisor.launch(key, launch)

    async def _speak(self, call: Call, supervisor: Supervisor, registered: Registered) -> None:
        """Telemetry, then heartbeats, then output. A write that takes longer than the lease ends the stream."""
        beat_s = telemetry_s = 0.0
        while True:
            now_s = time.monotonic()
            self._pending.woken.clear()
            beats = self._pending.changed or now_s >= beat_s
            if beats or now_s >= telemetry_s:
                # Before an exit is told: after that it may be too late.
                await self._tell_measured(call, supervisor, registered.lease_s)
                telemetry_s = now_s + TELEMETRY_S
            if beats:
                self._pending.changed = False
                statuses = [reports.status_of(worker) for worker in supervisor.workers]
                heartbeat = Heartbeat(
                    workers=statuses, rendezvous_ports=supervisor.ports.held, memory_jobs=supervisor.memory.jobs
                )
                await self._write(call, AgentMessage(heartbeat=heartbeat), registered.lease_s)
                beat_s = now_s + registered.heartbeat_s
            while (inventory := supervisor.next_inventory()) is not None:
                await self._write(call, AgentMessage(inventory=inventory), registered.lease_s)
            while (link := supervisor.links.next_report()) is not None:
                await self._write(call, AgentMessage(link=link), registered.lease_s)
            if (batch := supervisor.logs.next_batch()) is not None:
                await self._write(call, AgentMessage(log=batch), registered.lease_s)
                self._pending.woken.set()  # there may be more
            if not self._pending.woken.is_set() and supervisor.logs.all_sent:
                self._pending.all_sent.set()
            await asyncio.sleep(_PACE_S)
            await _wait_until(self._pending.woken, min(beat_s, telemetry_s))

    async def _relay(self, call: Call, supervisor: Supervisor, deadline_s: float) -> None:
        """Messages of strategies, each as it comes: who waits for an answer waits for milliseconds."""
        supervisor.strategy_messages.clear()
        while True:
            message = await supervisor.strategy_messages.next()
            await self._write(call, AgentMessage(strategy=message), deadline_s)

    async def _tell_measured(self, call: Call, supervisor: Supervisor, deadline_s: float) -> None:
        if samples := self._samples():
            await self._write(call, AgentMessage(telemetry=Telemetry(devices=samples)), deadline_s)
        for telemetry in supervisor.collector.take():
            try:
                await self._write(call, AgentMessage(telemetry=telemetry), deadline_s)
            except BaseException:  # also where the stream's other side failed and this one is cancelled
                supervisor.collector.lost(telemetry)
                raise

    async def _write(self, call: Call, message: AgentMessage, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s), self._writing:
                await call.write(message)
        except asyncio.InvalidStateError as error:
            raise StreamEnded("the stream is over") from error
        except TimeoutError as error:
            raise ControllerUnreachable(f"it took nothing for {deadline_s:g} s") from error


async def _wait_until(event: asyncio.Event, at_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, at_s - time.monotonic())):
            await event.wait()


async def _why_ended(call: Call) -> Exception:
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return StreamEnded("the controller ended the stream")
    return grpc.aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
