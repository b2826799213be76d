"""The process, and requests to it without a browser."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self


class Dashboard:
    """Used with `with`: started, and ended by SIGTERM, after which it must have ended well."""

    def __init__(self, controller: str) -> None:
        self._command = (sys.executable, "-m", "atoll.cli.main", "--controller", controller, "--timeout", "5")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            (*self._command, "dashboard", "--listen", "127.0.0.1:0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self.base, _, self.token = self.address.partition("/?token=")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        _, said = self._process.communicate(timeout=30)
        assert self._process.returncode == 0, said
        assert "Traceback" not in said, said

    def ask(
        self, path: str, body: bytes | None = None, *, cookie: str | None = None, host: str | None = None
    ) -> tuple[int, Any]:
        """Status and JSON, or text. With a body it is a POST. cookie: of who was let in, where None."""
        port = self.base.rpartition(":")[2]
        given = self.token if cookie is None else cookie
        request = urllib.request.Request(self.base + path, body, {"cookie": f"atoll-dashboard-{port}={given}"})
        if host is not None:
            request.add_header("host", host)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _read(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _read(error.read())


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
