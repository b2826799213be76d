"""The relay that agents are told of: the one that the controller was told of, or a child process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from atoll.controller.settings import ControllerSettings
from atoll.errors import SettingError
from atoll.host import child_process, die_with_parent
from atoll.host.ports import host_and_port
from atoll.network.rpc import split_address
from atoll.relay.handshake import node_key
from atoll.relay.server import read_secret
from atoll.v1 import agents_pb2

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0
_LONGEST_S: Final = 30.0
_START_S: Final = 20.0
_STOP_S: Final = 5.0


class RelayKeeper:
    """Owner of the relay process, on the event loop. The process ends when `run` is cancelled."""

    def __init__(self, settings: ControllerSettings, there: Callable[[], None]) -> None:
        """there: called when the relay is there, and each time that it is another one. Raises SettingError."""
        self._settings, self._there = settings, there
        self._wanted = asyncio.Event()
        self._host, self._port = split_address(settings.relay) if settings.relay is not None else ("", 0)
        if settings.relay_secret_file is not None:
            try:
                text = settings.relay_secret_file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                path = str(settings.relay_secret_file)
                raise SettingError("relay_secret_file", path, f"cannot be read: {error}", "Copy it here") from error
            self._secret = read_secret(text)
        else:
            self._secret = _own_secret(self._secret_file)

    def want(self) -> None:
        """There is a node behind NAT."""
        self._wanted.set()

    def access(self, node: str) -> agents_pb2.ControllerMessage | None:
        """Return the message about the relay for this node; None while there is no relay."""
        if not self._port:
            return None
        told = agents_pb2.UseRelay(host=self._host, port=self._port, key=node_key(self._secret, node))
        return agents_pb2.ControllerMessage(use_relay=told)

    async def run(self) -> None:
        """Keep the child alive, from when it is wanted. With a relay elsewhere there is nothing to do."""
        await (asyncio.Event() if self._settings.relay is not None else self._wanted).wait()
        pause_s = _AGAIN_S
        while True:
            child = await asyncio.create_subprocess_exec(
                *die_with_parent.command(self._command()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                if await self._started(child):
                    pause_s = _AGAIN_S
                    await child.wait()
                    logger.warning("the relay (process %d) ended; starting it again", child.pid)
                else:
                    logger.error("the relay does not start; see above. Another one: --relay HOST:PORT")
            finally:
                await child_process.end(child, "the relay", _STOP_S)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    async def _started(self, child: asyncio.subprocess.Process) -> bool:
        """Return True once the relay serves; its first line has the address."""
        assert child.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = (await child.stdout.readline()).decode().strip()
        except TimeoutError:
            return False
        if not line:
            return False
        before, (_, self._port) = self._port, split_address(line)
        logger.info("the relay serves on %s (process %d)", line, child.pid)
        if self._port != before:
            self._there()
        return True

    def _command(self) -> list[str]:
        host, listens = split_address(self._settings.listen)
        port = self._port or (listens + 1 if listens else 0)
        where = host_and_port(host, port)
        command = [sys.executable, "-m", "atoll.cli.main", "relay", "--listen", where]
        return [*command, "--secret-file", str(self._secret_file)]

    @property
    def _secret_file(self) -> Path:
        return self._settings.data_dir / "relay-secret"


def _own_secret(path: Path) -> bytes:
    """Made once: who was told a key by the controller before keeps it."""
    try:
        return read_secret(path.read_text())
    except FileNotFoundError:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        return read_secret(path.read_text())
