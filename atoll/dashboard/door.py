"""Lets in who holds the token of the address that was told, and nobody from another site's page."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
"""What a browser may have called this server: other names are another site's that resolves to this machine."""

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Door:
    """ASGI middleware. The token comes once in the page's address and stays in a cookie that scripts cannot read and
    other sites cannot send (SameSite=Strict); everything else is refused with 401, foreign host names with 421.

    names: what a browser may call this server, besides this machine's own names."""

    def __init__(self, app: ASGIApp, token: str, port: int, names: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._names = HOSTS | names
        self._cookie = f"atoll-dashboard-{port}"  # cookies know no ports: two dashboards on one host keep apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to who is not let in, or is sent on; None for who is."""
        if request.url.hostname not in self._names:
            return PlainTextResponse(f"This server is reached as {' or '.join(sorted(self._names))} alone.\n", 421)
        if self._knows(request.cookies.get(self._cookie, "")):
            return None
        if request.url.path == "/" and self._knows(request.query_params.get("token", "")):
            entry = RedirectResponse("/", 303)
            secure = request.url.scheme == "https"
            entry.set_cookie(self._cookie, self._token, secure=secure, httponly=True, samesite="strict")
            return entry
        return PlainTextResponse("Open the address that this dashboard told: it has the token.\n", 401)

    def _knows(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
