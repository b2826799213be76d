"""Channels to etcd's members: deadlines, failover, and what etcd's errors mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from atoll.errors import AtollError, BadInput, NotAllowed, NotFound, StoreUnavailable
from atoll.host.ports import DEFAULT_ETCD_PORT, host_and_port
from atoll.network.rpc import RenewedFiles, Tls, split_address
from atoll.v1.etcd_pb2_grpc import KVStub, LeaseStub, WatchStub

T = TypeVar("T")

# A member that lost the others refuses at once, in place of waiting; streams to it are ended.
HAS_LEADER: Final = (("hasleader", "true"),)
MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
_BETWEEN_ROUNDS_S: Final = 0.1
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),  # etcd ends the connection of a client that pings while idle
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # no other store's backoff or credentials
)


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """One etcd member as seen from here."""

    address: str
    channel: grpc.aio.Channel
    kv: Any
    lease: Any
    watch: Any


class Endpoints:
    """The members of one etcd cluster; the one that answered last is asked first. Made inside a running event loop."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None, timeout_s: float) -> None:
        if not addresses:
            raise BadInput("no etcd endpoint was given. Name at least one HOST:PORT")
        self.timeout_s: Final = timeout_s
        self._closed = asyncio.Event()
        self._encrypted = tls is not None
        self._tls, self._files = tls, RenewedFiles(tls)
        credentials = _credentials(*tls.read()) if tls is not None else None
        self._members = tuple(_member(address, credentials) for address in addresses)
        self._left: list[grpc.aio.Channel] = []  # made with files that were replaced since
        self._preferred = 0

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def single(self) -> bool:
        """The addresses name one member alone, which may be a cluster of one."""
        return len(self._members) == 1

    def preferred(self) -> EtcdMember:
        return self._members[self._preferred]

    def avoid(self, member: EtcdMember) -> None:
        """Ask another member next time, where there is one; with the certificate that lies there by now."""
        if self.preferred() is member:
            self._preferred = (self._preferred + 1) % len(self._members)
        if newest := self._files.newest():
            credentials = _credentials(*newest)
            self._left += [member.channel for member in self._members]
            self._members = tuple(_member(member.address, credentials) for member in self._members)

    async def call(self, attempt: Callable[[EtcdMember, float], Awaitable[T]], doing: str, repeatable: bool) -> T:
        """Carry out `attempt(member, timeout_s)` on the first member that can, within the deadline.

        An attempt that surely did not reach etcd is made again on the next member; one that may have is only where it
        is `repeatable`. Raises what `translate` makes of the last error.
        """
        deadline = time.monotonic() + self.timeout_s
        failures = 0
        while True:
            member = self.preferred()
            left_s = max(deadline - time.monotonic(), 0.001)
            untried = max(len(self._members) - failures, 1)
            timeout_s = left_s / untried if repeatable else left_s  # a hung member must leave time for the others
            with self.errors(doing, member, repeatable):
                try:
                    return await attempt(member, timeout_s)
                except grpc.aio.AioRpcError as error:
                    self.avoid(member)
                    failures += 1
                    pause_s = 0.0 if failures % len(self._members) else _BETWEEN_ROUNDS_S
                    again = never_reached(error) or (repeatable and error.code() in _TRANSIENT)
                    if not again or time.monotonic() + pause_s >= deadline:
                        raise
            await self.pause(pause_s)

    def call_blocking(self, attempt: Callable[[LeaseStub, float], T], doing: str, timeout_s: float) -> T:
        """Carry out what may be repeated over a connection of its own, for a thread: none of the event loop's parts
        takes part. The members are asked in turn. Raises what `translate` makes of the last error."""
        deadline = time.monotonic() + min(timeout_s, self.timeout_s)
        preferred = self._preferred
        addresses = [member.address for member in (*self._members[preferred:], *self._members[:preferred])]
        for index, address in enumerate(addresses):
            left_s = max(deadline - time.monotonic(), 0.001) / (len(addresses) - index)
            channel = _blocking_channel(address, self._tls)
            try:
                return attempt(LeaseStub(channel), left_s)
            except grpc.RpcError as error:
                failed, asked = error, address
            finally:
                channel.close()
        raise translate(failed, doing, asked, True, self._encrypted) from failed

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until `close`."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            pass

    @contextmanager
    def errors(self, doing: str, member: EtcdMember, repeatable: bool = True) -> Iterator[None]:
        """Turn every way in which gRPC ends a call inside the block into an AtollError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise translate(error, doing, member.address, repeatable, self._encrypted) from error
        except TimeoutError as error:
            raise StoreUnavailable(f"{doing}: etcd at {member.address} went silent") from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise StoreUnavailable(f"{doing}: the connection to etcd at {member.address} is closed") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC says "cancelled" to calls whose channel is closed under them; nobody cancelled this task.
            raise StoreUnavailable(f"{doing}: the connection to etcd at {member.address} is closed") from None

    async def close(self) -> None:
        self._closed.set()
        channels = [*self._left, *(member.channel for member in self._members)]
        await asyncio.gather(*(channel.close() for channel in channels))


def _credentials(ca: bytes, certificate: bytes, key: bytes) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _member(address: str, credentials: grpc.ChannelCredentials | None) -> EtcdMember:
    target = address
    if not address.startswith("unix:"):
        host, port = split_address(address, DEFAULT_ETCD_PORT)
        target = host_and_port(host, port)
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
    return EtcdMember(target, channel, KVStub(channel), LeaseStub(channel), WatchStub(channel))


def _blocking_channel(target: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    return grpc.secure_channel(target, _credentials(*tls.read()), options=_OPTIONS)


_TRANSIENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_NEVER_REACHED: Final = ("failed to connect to all addresses", "etcdserver: no leader", "DNS resolution failed")


def never_reached(error: Any) -> bool:
    """Return True if the request surely had no effect: never sent, or refused before anything was proposed."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(reason in details for reason in _NEVER_REACHED)


def translate(error: Any, doing: str, address: str, repeatable: bool, encrypted: bool = True) -> AtollError:
    """Translate an error of etcd. Only this function knows etcd's codes and texts.

    error: grpc's, of either of its interfaces; they share no class that has codes."""
    details = (error.details() or error.code().name).removeprefix("etcdserver: ")
    where = f"{doing}: etcd at {address}"
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return BadInput(f"{where} refused: {details}")
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(f"{where}: {details}")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return NotAllowed(f"{where} refused this identity: {details}. Use the controller's etcd certificate")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "space exceeded" in details:
            next_step = "Compact and defragment it or raise its quota, then `etcdctl alarm disarm`"
            return StoreUnavailable(f"{where} is full: {details}. {next_step}")
        case grpc.StatusCode.OUT_OF_RANGE:
            return StoreUnavailable(f"{where} compacted its history meanwhile: {details}. Read again")
    if not repeatable and error.code() in _TRANSIENT and not never_reached(error):
        return StoreUnavailable(
            f"{where} did not confirm, so the outcome is unknown: {details}. Read before writing again"
        )
    return StoreUnavailable(f"{where} cannot be used: {details}.{_hint(details, encrypted)}")


_SECURING: Final = ("handshake", "ssl", "tls", "tsi_", "certificate", "socket closed", "peer")
"""Words of gRPC for a connection that broke while it was secured; they differ between its releases."""


def _hint(details: str, encrypted: bool) -> str:
    """Return the next step for a connection that failed while it was secured, which gRPC's own words do not say."""
    text = details.lower()
    if encrypted and any(word in text for word in _SECURING):
        return " If etcd runs: are its certificate and this one signed by the same CA, and is the host name in it?"
    if not encrypted and any(word in text for word in ("socket closed", "reset", "broken pipe", "eof")):
        return " If etcd runs with TLS: give this controller a CA, a certificate and a key for it"
    return " Is it running, and is the address right?"
