"""The gate of every call before a servicer sees it: who may call, does this controller lead, can the message be read.
And on the way out every error becomes a status code and one line, never a traceback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from atoll.controller.jobs.agents.sessions import DeviceTaken, NameTaken
from atoll.controller.jobs.lifecycle.leader_epoch import LeaderEpoch
from atoll.controller.services.revocation import Revocations
from atoll.errors import (
    AtollError,
    BadInput,
    Conflict,
    ControllerUnreachable,
    DeadlineExceeded,
    LeadershipLost,
    NoFeasiblePlan,
    NotAllowed,
    NotFound,
    StoreUnavailable,
)
from atoll.network.rpc import LEADER_METADATA

logger = logging.getLogger(__name__)

FIRST_MESSAGE_S: Final = 2.0
JOB_SERVICE: Final = "atoll.v1.JobService"
AGENT_SERVICE: Final = "atoll.v1.AgentService"
UNAUTHENTICATED: Final = "unauthenticated"
AGENT_ROLES: Final = ("agent", "volunteer")
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {JOB_SERVICE: ("client",), AGENT_SERVICE: AGENT_ROLES}


class WrongToken(NotAllowed):
    """The join token does not match."""


# atoll.network.rpc.MEANING backwards; the first that fits counts, so subclasses come first.
_CODES: Final[tuple[tuple[type[AtollError], grpc.StatusCode], ...]] = (
    (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    (DeviceTaken, grpc.StatusCode.ALREADY_EXISTS),
    (WrongToken, grpc.StatusCode.UNAUTHENTICATED),
    (BadInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NoFeasiblePlan, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ControllerUnreachable, grpc.StatusCode.UNAVAILABLE),
    (StoreUnavailable, grpc.StatusCode.UNAVAILABLE),
    (LeadershipLost, grpc.StatusCode.UNAVAILABLE),
)


@dataclass(slots=True)
class KnownLeader:
    """The leader, as far as this controller knows. `epoch` is set while it is this one."""

    epoch: LeaderEpoch | None = None
    leader: str = ""
    restarted: bool = False
    """The lease of this controller's own life before still lasts; until then nobody leads."""

    def leading(self) -> LeaderEpoch:
        """Raises ControllerUnreachable on a controller that does not lead."""
        if self.epoch is None or self.epoch.over.is_set():
            other = f"; {self.leader} leads" if self.leader else ", and none is known to"
            if self.restarted:
                other = " yet: it was restarted, and the lease that it led by before runs out within seconds"
            raise ControllerUnreachable(f"this controller does not lead{other}")
        return self.epoch


class _Unreadable:
    """Stands in for a message that could not be parsed."""

    def __init__(self, error: Exception) -> None:
        self.error = error


Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, Context], Awaitable[Any]]


class Gate(grpc.aio.ServerInterceptor):
    """revocations: of callers' certificates, whose names decide what they may call; None where they have none."""

    def __init__(self, known_leader: KnownLeader, revocations: Revocations | None) -> None:
        self._known_leader = known_leader
        self._revocations = revocations

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        service = details.method.strip("/").partition("/")[0]
        if handler is None or service not in _ROLES:
            return handler  # health, reflection, or no such method
        sides = ("stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming))
        kind = "_".join(sides)
        guarded = self._guard(getattr(handler, kind), details.method, service)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, _lenient(handler.request_deserializer), _once(handler.response_serializer))

    def _guard(self, behaviour: _Behaviour, method: str, service: str) -> _Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            stream = _RequestStream(request) if hasattr(request, "__aiter__") else None
            try:
                with self._admitted(context, service):
                    self._known_leader.leading()
                    return await behaviour(stream or _readable(request), context)
            except AtollError as error:
                failure: Exception = error
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                logger.exception("%s failed", method)
                failure = error
            if stream is not None:
                await stream.heard_out()
            await self._refuse(failure, method, context)
            return None

        return guarded

    def _admitted(self, context: Context, service: str) -> AbstractContextManager[None]:
        """Around a call. Raises NotAllowed for a caller of another role, or with a certificate that is revoked."""
        if self._revocations is None:
            return nullcontext()
        caller_identity(context, *_ROLES[service])
        [certificate] = context.auth_context()["x509_pem_cert"]
        return self._revocations.checked(certificate, caller(context))

    async def _refuse(self, error: Exception, method: str, context: Context) -> None:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
        text = str(error) if isinstance(error, AtollError) else f"{method} failed inside the controller; see its log"
        metadata: tuple[tuple[str, str], ...] = ()
        if code is grpc.StatusCode.UNAVAILABLE and self._known_leader.leader:
            metadata = ((LEADER_METADATA, self._known_leader.leader),)
        await context.abort(code, text, metadata)


def caller(context: Context) -> str:
    """Return the caller for records: the common name of the certificate, "unauthenticated" without one."""
    names = list(context.auth_context().get("x509_common_name", ()))
    return names[0].decode("utf-8", "replace") if names else UNAUTHENTICATED


def caller_identity(context: Context, *roles: str) -> tuple[str, str]:
    """Role and NAME of the caller's certificate "role:NAME". Raises NotAllowed for one of none of these roles."""
    common_name = caller(context)
    role, _, name = common_name.partition(":")
    if role not in roles or not name:
        raise NotAllowed(
            f'the certificate {common_name!r} may not call this: it takes one of "{roles[0]}:NAME". '
            f"`atoll certs {roles[0]} NAME` makes it"
        )
    return role, name


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC turns a parse error into UNKNOWN; here it is carried to where it becomes INVALID_ARGUMENT."""

    def parse_leniently(data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, ValueError, RuntimeError) as error:
            return _Unreadable(error)

    return parse_leniently


def _once(serialise: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A message that goes to many is serialised by whoever made it, and comes here as bytes."""

    def serialise_once(message: Any) -> bytes:
        return message if isinstance(message, bytes) else serialise(message)

    return serialise_once


def _readable(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise BadInput(f"the message cannot be parsed: {request.error}. Is it of another version of Atoll?")
    return request


class _RequestStream:
    """A caller's messages, as they are read."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)
        self._heard = False

    def __aiter__(self) -> _RequestStream:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        self._heard = True
        return _readable(request)

    async def heard_out(self) -> None:
        """Wait until the first message has come: where it is still under way when the stream ends, gRPC tells the
        caller that sending failed, and not why it was refused."""
        if not self._heard:
            with suppress(TimeoutError, StopAsyncIteration, BadInput):
                async with asyncio.timeout(FIRST_MESSAGE_S):
                    await anext(self)
