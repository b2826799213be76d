"""The routes: the page's files, JSON of what it shows, its stream, and the two things that it may ask for."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from atoll.cli.render import curves
from atoll.cli.render.log_lines import LogLines
from atoll.dashboard import pages
from atoll.dashboard.door import Door
from atoll.dashboard.stream import ClusterFeed, messages
from atoll.errors import AtollError, BadInput, Conflict, ControllerUnreachable, NotAllowed, NotFound

if TYPE_CHECKING:
    from starlette.requests import Request

    from atoll.client.client import AsyncClient

ASSETS: Final = Path(__file__).parent / "assets"
STREAMS: Final = 32
"""Pages that may be open at once."""
POINTS: Final = 600
"""Of a curve: more than a screen has columns to draw them in."""
EVENTS: Final = 500
LINES: Final = 2000
MAX_BODY_BYTES: Final = 65_536

_STATUS: Final[tuple[tuple[type[AtollError], int], ...]] = (
    (NotFound, 404),
    (BadInput, 400),
    (Conflict, 409),
    (NotAllowed, 403),
    (ControllerUnreachable, 503),
)


def dashboard(client: AsyncClient, token: str, port: int, names: frozenset[str] = frozenset()) -> Starlette:
    """The application. client: whose certificate and rights all of its pages have; its owner closes it. names: by which
    it is reached from other machines."""
    feed, open_streams = ClusterFeed(client), 0

    async def page(request: Request) -> Response:
        return FileResponse(ASSETS / "index.html")

    async def stream(request: Request) -> Response:
        nonlocal open_streams
        if open_streams >= STREAMS:
            return JSONResponse({"error": f"{STREAMS} pages are open already. Close one"}, 503)

        async def counted() -> AsyncIterator[str]:
            nonlocal open_streams
            open_streams += 1
            try:
                async with aclosing(messages(client, feed, request.query_params.get("job", ""))) as said:
                    async for one in said:
                        yield one
            finally:
                open_streams -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")

    async def job_curves(request: Request) -> Any:
        found = await client.curves(request.path_params["job"], most_points=POINTS)
        return {"curves": [curves.to_plain(curve) for curve in found]}

    async def job_plans(request: Request) -> Any:
        return pages.plans(await client.plans(request.path_params["job"], _number(request, "run")))

    async def events(request: Request) -> Any:
        """The newest before a sequence number, oldest first."""
        before = _number(request, "before") or 2**63
        async with aclosing(client.events(request.path_params.get("job", ""))) as happened:
            found = [pages.event(one) async for one in happened if one.sequence < before]
        return {"events": found[-EVENTS:], "earlier": max(len(found) - EVENTS, 0)}

    async def job_logs(request: Request) -> Any:
        rank, lines = request.query_params.get("rank"), LogLines()
        written = client.logs(
            request.path_params["job"], rank=_number(request, "rank") if rank else None, tail_lines=LINES
        )
        async with aclosing(written) as chunks:
            found = [line async for chunk in chunks for line in lines.of(chunk)]
        found = [*found, *lines.rest()][-LINES:]
        return {"lines": [{"run": run, "rank": number, "text": text} for run, number, text in found]}

    async def cancel(request: Request) -> Any:
        return pages.job(await client.cancel(request.path_params["job"]), time.time())

    async def adjust(request: Request) -> Any:
        """JSON with `total_batch` (0: not asked) and `unpin` (a list of names)."""
        asked = await _body(request)
        total_batch, unpin = asked.get("total_batch", 0), asked.get("unpin", [])
        if not isinstance(total_batch, int) or total_batch < 0:
            raise BadInput(f"total_batch {total_batch!r} must be a whole number of samples, at least 1")
        if not isinstance(unpin, list) or not all(isinstance(name, str) for name in unpin):
            raise BadInput(f"unpin {unpin!r} must be a list of names")
        job = request.path_params["job"]
        return pages.job(await client.adjust(job, total_batch=total_batch, unpin=unpin), time.time())

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/stream", stream),
            Route("/api/events", _json(events)),
            Route("/api/jobs/{job}/events", _json(events)),
            Route("/api/jobs/{job}/curves", _json(job_curves)),
            Route("/api/jobs/{job}/plans", _json(job_plans)),
            Route("/api/jobs/{job}/logs", _json(job_logs)),
            Route("/api/jobs/{job}/cancel", _json(cancel), methods=["POST"]),
            Route("/api/jobs/{job}/adjust", _json(adjust), methods=["POST"]),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        exception_handlers={AtollError: _refused},
        middleware=[Middleware(Door, token=token, port=port, names=names)],
    )


def _json(work: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(await work(request))

    return endpoint


def _refused(request: Request, error: Exception) -> Response:
    """Answer an error of Atoll by its status and its one line."""
    return JSONResponse({"error": str(error)}, next((code for kind, code in _STATUS if isinstance(error, kind)), 500))


def _number(request: Request, name: str) -> int:
    """A parameter of the address; 0 where it is absent. Raises BadInput."""
    text = request.query_params.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadInput(f"{name} {text[:40]!r} must be a whole number, 0 or more")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that came. Raises BadInput where it is none, or larger than 64 KiB."""
    received = b""
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY_BYTES:
            raise BadInput(f"a request of over {MAX_BODY_BYTES} bytes. Send less")
    try:
        found = json.loads(received or b"{}")
    except ValueError as error:
        raise BadInput(f"what was sent is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput("what was sent is no JSON object")
    return found
