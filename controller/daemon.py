"""The controller daemon: serves gRPC always, leads while it holds the leader key, stands by otherwise."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import aio as health  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch, LeaderEpochSettings
from atoll.controller.relaying import RelayKeeper
from atoll.controller.services.agents import AgentServicer
from atoll.controller.services.curves import CurveStore
from atoll.controller.services.gate import AGENT_SERVICE, JOB_SERVICE, Gate, KnownLeader
from atoll.controller.services.jobs import JobServicer
from atoll.controller.services.logs import LogStore
from atoll.controller.services.measures import measures
from atoll.controller.services.revocation import Revocations
from atoll.controller.settings import ControllerSettings
from atoll.controller.state import keys
from atoll.controller.state.election import Election
from atoll.controller.state.embedded import EmbeddedEtcd
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.store import Entry, Fence
from atoll.errors import LeadershipLost, SettingError, StoreUnavailable
from atoll.host.ports import host_and_port
from atoll.network.rpc import SERVER_OPTIONS, is_loopback, server_credentials, split_address
from atoll.telemetry.prometheus import exposed
from atoll.v1 import agents_pb2_grpc, jobs_pb2_grpc

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 1.0
PARALLEL_CALLS: Final = 8192
"""Each agent's stream is a call for as long as it lives."""


Beside = Callable[[str], AbstractAsyncContextManager[object]]
"""Service beside a controller, given the address that other machines use."""


async def serve(settings: ControllerSettings, stop: asyncio.Event, beside: Beside = nullcontext) -> None:
    """Run until `stop` is set. When this returns or raises, nothing it started is alive.

    Raises SettingError for what cannot work (a port in use, a data folder in use), StoreUnavailable where the private
    etcd does not start.
    """
    token = settings.read_token()
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with AsyncExitStack() as stack:
        stack.enter_context(_alone_in(settings.data_dir))
        endpoints: tuple[str, ...] = settings.etcd
        if not endpoints:
            etcd = EmbeddedEtcd(settings.data_dir / "etcd", settings.data_dir / "etcd.log")
            stack.push_async_callback(etcd.stop)
            await etcd.start()
            endpoints = (etcd.endpoint,)
        elif settings.etcd_tls is None:
            logger.warning(
                "etcd at %s is used without TLS: whoever reaches it, every user of its machine at least, can run code "
                "on every node. Give --etcd-ca, --etcd-cert and --etcd-key",
                ", ".join(endpoints),
            )
        store = EtcdStore(endpoints, settings.etcd_tls)
        stack.push_async_callback(store.close)
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="bundles"))
        disk = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="logs"))
        known_leader, logs = KnownLeader(), LogStore(settings.data_dir / "logs.sqlite3")
        curves = CurveStore(settings.data_dir / "curves.sqlite3")
        stack.callback(lambda: (disk.submit(curves.close), disk.submit(logs.close)))
        servicers = (
            JobServicer(known_leader, logs, curves, executor, disk),
            AgentServicer(known_leader, logs, curves, disk, token=token, identities=settings.tls is not None),
        )
        checker = health.HealthServicer()
        revocations = Revocations(settings.tls.ca) if settings.tls is not None else None
        if revocations is not None:
            await stack.enter_async_context(_running("revocations", revocations.follow(), stop))
        gate = Gate(known_leader, revocations)
        address = await stack.enter_async_context(_server(settings, gate, servicers, checker))
        relay = RelayKeeper(settings, lambda: _send_relay_access(known_leader))
        await stack.enter_async_context(_running("relay", relay.run(), stop))
        candidate = _Candidate(
            settings=settings,
            relay=relay,
            store=store,
            known_leader=known_leader,
            removed=lambda job: (disk.submit(logs.remove, job), disk.submit(curves.remove, job)),
            checker=checker,
            address=address,
        )
        await stack.enter_async_context(_running("candidate", candidate.run(), stop))
        url = await stack.enter_async_context(exposed(settings.metrics, lambda: measures(known_leader.epoch)))
        await stack.enter_async_context(beside(address))
        _write_address(settings.data_dir / "address", address)
        logger.info("serving on %s%s", address, url and f", measurements on {url}")
        await stop.wait()
        await checker.set("", health_pb2.HealthCheckResponse.NOT_SERVING)


@asynccontextmanager
async def _running(name: str, work: Coroutine[None, None, None], stop: asyncio.Event) -> AsyncIterator[None]:
    """Endless work as a task; the candidate is stopped before the server, so that streams end with a word."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(lambda _: stop.set())  # it ends by itself only by a failure: then all of this ends
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


@dataclass
class _Candidate:
    """Campaigns, leads while it may, campaigns again. For ever, until cancelled."""

    settings: ControllerSettings
    relay: RelayKeeper
    store: EtcdStore
    known_leader: KnownLeader
    removed: Callable[[str], object]
    checker: health.HealthServicer
    address: str

    def __post_init__(self) -> None:
        value = json.dumps({"id": uuid.uuid4().hex, "address": self.address}, sort_keys=True).encode()
        self._election = Election(self.store, keys.LEADER, value, self.settings.leader_lease_s)

    async def run(self) -> None:
        await self.checker.set("", health_pb2.HealthCheckResponse.SERVING)
        while True:
            await self.checker.set(JOB_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
            leadership = await self._election.campaign(self._note_leader)
            try:
                await self._lead(leadership.fence, leadership.lost)
            except (LeadershipLost, StoreUnavailable) as error:
                logger.warning("leading no more: %s", error)
            except Exception:
                logger.exception("the leader's work failed; this controller ends")
                raise
            finally:
                self.known_leader.epoch = None
                await leadership.resign()

    async def _lead(self, fence: Fence, lost: asyncio.Event) -> None:
        settings = LeaderEpochSettings(
            controller=self.address,
            heartbeat_s=self.settings.heartbeat_s,
            node_lease_s=self.settings.node_lease_s,
            private=self.settings.tls is not None or is_loopback(split_address(self.settings.listen)[0]),
            relay=self.relay,
        )
        epoch = LeaderEpoch(self.store, fence, settings, self.removed)
        await epoch.load()
        self.known_leader.epoch, self.known_leader.leader = epoch, self.address
        self.known_leader.restarted = False
        await self.checker.set(JOB_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        logger.info("leading")
        parts = [
            asyncio.create_task(epoch.run(), name="leader-epoch"),
            asyncio.create_task(lost.wait(), name="leadership-lost"),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            self.known_leader.epoch, self.known_leader.leader = None, ""
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _note_leader(self, entry: Entry | None) -> None:
        """Note the leader while standing by, so that misdirected clients learn its address."""
        leader = json.loads(entry.value)["address"] if entry else ""
        self.known_leader.restarted = leader == self.address
        self.known_leader.leader = "" if self.known_leader.restarted else leader
        if self.known_leader.leader:
            logger.info("standing by, %s leads", leader)


def _send_relay_access(known_leader: KnownLeader) -> None:
    """Send all agents their access, if this controller leads. Later agents get theirs when they register."""
    if known_leader.epoch is not None:
        known_leader.epoch.send_relay_access()


@asynccontextmanager
async def _server(
    settings: ControllerSettings,
    gate: Gate,
    servicers: tuple[JobServicer, AgentServicer],
    checker: health.HealthServicer,
) -> AsyncIterator[str]:
    """A started server. Gives the address that others are told."""
    server = grpc.aio.server(interceptors=[gate], options=SERVER_OPTIONS, maximum_concurrent_rpcs=PARALLEL_CALLS)
    jobs_pb2_grpc.add_JobServiceServicer_to_server(servicers[0], server)
    agents_pb2_grpc.add_AgentServiceServicer_to_server(servicers[1], server)
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    names = (JOB_SERVICE, AGENT_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        if settings.tls is None:
            port = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, server_credentials(settings.tls))
    except RuntimeError as error:
        why = "cannot be listened on: the port is in use, or the address is not this machine's"
        raise SettingError("listen", settings.listen, why, "Choose another with --listen") from error
    await server.start()
    try:
        yield settings.advertise or _reachable(settings.listen, port)
    finally:
        await server.stop(STOP_GRACE_S)


def _reachable(listen: str, port: int) -> str:
    """Return the default advertised address: `listen`, or this host's name for 'all addresses'."""
    host, _ = split_address(listen)
    if host in ("0.0.0.0", "::") and not is_loopback(host):
        host = socket.gethostname()
    return host_and_port(host, port)


@contextmanager
def _alone_in(data_dir: Path) -> Iterator[None]:
    """Hold the data folder: two controllers in it would overwrite each other's logs."""
    lock = os.open(data_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = "is in use by another controller"
            raise SettingError("data_dir", str(data_dir), why, "Stop it, or choose another folder") from error
        yield
    finally:
        os.close(lock)


def _write_address(path: Path, address: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(address + "\n")
    os.replace(fresh, path)
