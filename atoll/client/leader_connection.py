"""The way to whichever controller leads: calls are repeated until one is answered, streams say how they ended."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio

from atoll.errors import AtollError, BadInput, ControllerUnreachable, NotAllowed
from atoll.host.ports import host_and_port
from atoll.network.rpc import RenewedFiles, Tls, leader_hint, open_channel, split_address, translate
from atoll.security.handshakes import certificate_problem, ended_at_once, refused_in_silence
from atoll.v1.jobs_pb2_grpc import JobServiceStub

waiting: Final = logging.getLogger(f"{__name__}.waiting")

# Every call may be repeated (Submit has its request id), so whatever says "nobody did it" is tried again.
_TRY_AGAIN: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)
_BACKOFF_S: Final = (0.1, 1.0)
_SILENCE_S: Final = 2.0
"""A call that nobody answers for so long is told of; it goes on."""
_SAYS_S: Final = 1.0
"""A call that had less time and none of it left says nothing of whom it asked: what was heard before it is told."""
_HEALTHY_STREAM_S: Final = 2.0
"""Life of a stream, in seconds, after which its break is no sign of an unreachable controller."""
_STREAM_LIFE_S: Final = 300.0  # a stream is opened anew after this long: none can hang for ever unnoticed

_T = TypeVar("_T")

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2_grpc import JobServiceAsyncStub

    Stream: TypeAlias = grpc.aio.UnaryStreamCall[Any, _T]


class Leader:
    """Connections to the controllers of one cluster, and which of them led last. Arguments as of AsyncClient."""

    def __init__(self, controllers: Sequence[str], tls: Tls | None, timeout_s: float) -> None:
        if not controllers:
            raise BadInput("no controller named. Give HOST:PORT of at least one")
        if not timeout_s > 0:
            raise BadInput(f"timeout = {timeout_s} s must be positive. Leave it out for 10")
        self._addresses = [_normal(address) for address in controllers]
        self._current = self._addresses[0]
        self._tls = tls
        self._files = RenewedFiles(tls)
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._left: list[grpc.aio.Channel] = []  # made with files that were replaced since; streams may be open

    async def close(self) -> None:
        """Close the connections; streams that are open end."""
        channels, self._channels, self._left = [*self._left, *self._channels.values()], {}, []
        for channel in channels:
            await channel.close()

    async def call(self, doing: str, attempt: Callable[[JobServiceAsyncStub, float], Awaitable[_T]]) -> _T:
        """One unary call, tried at whoever may lead until it is answered or timeout_s has passed."""
        began = time.monotonic()
        ends = began + self._timeout_s
        pause_s, hinted, told, telling = _BACKOFF_S[0], False, False, None
        while True:
            # With several controllers one that hangs must leave time for the others.
            left_s = max(0.05, ends - time.monotonic())
            deadline_s = left_s if len(self._addresses) == 1 else max(1.0, left_s / 2)
            try:
                return await attempt(self._stub(), deadline_s)
            except grpc.aio.AioRpcError as error:
                self._raise_if_final(error, doing)
                if telling is None or deadline_s >= _SAYS_S or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    telling = error
                if time.monotonic() >= ends:
                    self._next_address()  # whoever asks again shall not wait for the one that hangs
                    raise self._unreachable(doing, telling) from telling
                hint = leader_hint(error)
                if hint and not hinted:
                    self._current, hinted = hint, True
                    continue
                if not told and time.monotonic() - began > _SILENCE_S:
                    told = True
                    waiting.warning("%s. Trying for %g s", self._no_leader(error), self._timeout_s)
                self._next_address()
                hinted = False
            await asyncio.sleep(min(random.uniform(pause_s / 2, pause_s), max(0.0, ends - time.monotonic())))
            pause_s = min(2 * pause_s, _BACKOFF_S[1])

    async def stream(
        self,
        doing: str,
        start: Callable[[JobServiceAsyncStub, float], Stream[_T]],
        ended: Callable[[], Awaitable[bool]],
        *,
        follow: bool = True,
    ) -> AsyncGenerator[_T, None]:
        """Yield a subscription's messages. A stream that breaks is opened again.

        ended: called after each stream, by way of the leading controller: True if nothing more will come. It does not
        count after a stream that broke, whose last messages may be lost. follow: False for what one whole stream has.
        Raises ControllerUnreachable if streams have broken at once for timeout_s."""
        failing_since_s = float("inf")
        while True:
            opened_s, delivered, whole = time.monotonic(), False, False
            call = start(self._stub(), _STREAM_LIFE_S)
            try:
                async for message in call:
                    delivered = True
                    yield message
                whole = True
            except grpc.aio.AioRpcError as error:
                self._raise_if_final(error, doing)
                self._current = leader_hint(error) or self._current
                now_s = time.monotonic()
                healthy = delivered or now_s - opened_s > _HEALTHY_STREAM_S
                failing_since_s = float("inf") if healthy else min(failing_since_s, now_s)
                if now_s - failing_since_s > self._timeout_s:
                    raise self._unreachable(doing, error) from error
            finally:
                call.cancel()
            if whole and not follow:
                return
            if not (whole and delivered):
                await asyncio.sleep(random.uniform(_BACKOFF_S[0] / 2, _BACKOFF_S[0]))
            if await ended() and whole:
                return

    def _raise_if_final(self, error: grpc.aio.AioRpcError, doing: str) -> None:
        if why := certificate_problem(error.details() or ""):
            raise NotAllowed(f"{doing}: {self._current}: {why}") from error
        if error.code() not in _TRY_AGAIN:
            raise translate(error, doing, self._current) from error

    def _unreachable(self, doing: str, error: grpc.aio.AioRpcError) -> AtollError:
        details = error.details() or error.code().name
        if ended_at_once(details):
            return NotAllowed(f"{doing}: {self._current} {refused_in_silence(self._tls)}")
        return ControllerUnreachable(
            f"{doing}: {self._no_leader(error, f' within {self._timeout_s:g} s')}. "
            "Start one with `atoll up --detach`, name the right one with --controller HOST:PORT, or see `atoll doctor`"
        )

    def _no_leader(self, error: grpc.aio.AioRpcError, within: str = "") -> str:
        # gRPC lists how it failed from the outside in; users need the innermost: "Connection refused".
        cause = (error.details() or error.code().name).rpartition(": ")[2]
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            cause = "it does not answer"
        return f"no leading controller at {', '.join(self._addresses)}{within}: {cause}"

    def _next_address(self) -> None:
        known = self._addresses
        here = known.index(self._current) if self._current in known else -1
        self._current = known[(here + 1) % len(known)]

    def _stub(self) -> JobServiceAsyncStub:
        if self._files.newest():
            self._left += self._channels.values()
            self._channels = {}
        if self._current not in self._channels:
            self._channels[self._current] = open_channel(self._current, self._tls)
        return JobServiceStub(self._channels[self._current])


def _normal(address: str) -> str:
    host, port = split_address(address)
    return host_and_port(host, port)
