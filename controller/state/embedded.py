"""A private etcd for a controller without one: a child process that ends with it, and that no other user reaches.

It listens on Unix sockets in a folder of mode 0700 and on no port: whoever can write to it runs code on every node.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.etcd_binary import environment, find_etcd
from atoll.errors import AtollError, StoreUnavailable
from atoll.host import child_process, die_with_parent

logger = logging.getLogger(__name__)

_QUOTA_BYTES: Final = 2 * 1024**3
_START_S: Final = 20.0
_STOP_S: Final = 5.0
_UNLOCK_S: Final = 10.0  # the etcd of a controller that was just killed needs a moment to end
_FIRST_BACKOFF_S: Final = 0.2
_LAST_BACKOFF_S: Final = 5.0
# Names of sockets in the folder it runs in. etcd before 3.5.10 asks for HOST:PORT after unix:// too.
_CLIENT_SOCKET: Final = "client:0"
_PEER_SOCKET: Final = "peer:0"
_MAX_SOCKET_PATH: Final = 107  # bytes, of sockaddr_un


class EmbeddedEtcd:
    """A real etcd with its data in `data_dir`, its sockets in a folder beside it, and what it says in the file `log`.

    Start it from the thread that runs as long as the controller: the kernel ends the child with that thread.
    """

    def __init__(self, data_dir: Path, log: Path) -> None:
        self._data_dir = data_dir
        self._log = log
        self._sockets = data_dir.with_name(f"{data_dir.name}-sockets")
        self._sockets_fd = -1  # open while it runs
        self._log_begins = 0  # where in the log the present child's words begin
        self._argv: Sequence[str] = ()
        self._child: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """Address for an EtcdStore of this process, once started; restarts of the child keep it."""
        path = self._sockets / _CLIENT_SOCKET
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            path = Path(f"/proc/self/fd/{self._sockets_fd}") / _CLIENT_SOCKET
        return f"unix:{path}"

    @property
    def pid(self) -> int | None:
        """The etcd process; None while there is none."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def start(self) -> None:
        """Return when etcd serves.

        Raises StoreUnavailable where no etcd is installed, the data directory is in use by a live one or cannot be
        made, or etcd does not become healthy within 20 s; the message ends with the last lines of its log.
        """
        binary = await asyncio.to_thread(find_etcd)
        if binary.doubt:
            logger.warning("%s %s; `atoll install-etcd` puts a newer one in its place", binary, binary.doubt)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self._data_dir, self._sockets):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                folder.chmod(0o700)  # one that somebody made before
            self._sockets_fd = os.open(self._sockets, os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot keep data in {self._data_dir}: {error}. Choose another directory"
            ) from error
        self._argv = self._command(binary.path)
        try:
            await self._until_unlocked()
            child = await self._spawn()
            await self._until_healthy(child)
        except BaseException:
            await self.stop()
            raise
        self._supervising = asyncio.create_task(self._supervise(child), name="embedded-etcd")

    async def stop(self) -> None:
        """End etcd: SIGTERM, and SIGKILL after 5 s. May be called without `start`, and twice."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising})
            self._supervising = None
        await self._end_child()
        if self._sockets_fd >= 0:
            os.close(self._sockets_fd)
            self._sockets_fd = -1

    async def _supervise(self, child: asyncio.subprocess.Process) -> None:
        """Start it again whenever it ends, on the same sockets."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began_s = time.monotonic()
            code = await child.wait()
            if time.monotonic() - began_s > 10 * _LAST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            logger.warning("etcd ended with %d; starting it again in %.1f s. %s", code, backoff_s, self._last_words())
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
            try:
                child = await self._spawn()
            except OSError as error:
                logger.error("etcd cannot be started again just now: %s", error)

    async def _spawn(self) -> asyncio.subprocess.Process:
        for name in (_CLIENT_SOCKET, _PEER_SOCKET):
            (self._sockets / name).unlink(missing_ok=True)  # of one that was killed; etcd 3.4 minds it
        with self._log.open("ab") as log:
            self._log_begins = log.tell()
            self._child = await asyncio.create_subprocess_exec(
                # SIGTERM lets etcd close its files in order; one that does not mind it minds a lost machine no more.
                *die_with_parent.command(self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=self._sockets,
                umask=0o077,
                start_new_session=True,  # Ctrl-C at a terminal is for the controller, which then stops etcd last
            )
        return self._child

    async def _end_child(self) -> None:
        if self._child is not None:
            await child_process.end(self._child, "etcd", _STOP_S)

    async def _until_unlocked(self) -> None:
        deadline = time.monotonic() + _UNLOCK_S
        while _locked(self._data_dir):
            if time.monotonic() >= deadline:
                raise StoreUnavailable(
                    f"data directory {self._data_dir} is in use by another etcd that runs. Stop that controller, or "
                    "choose another directory with --data-dir"
                )
            await asyncio.sleep(0.1)

    async def _until_healthy(self, child: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + _START_S
        store = EtcdStore([self.endpoint], None, timeout_s=1.0)
        try:
            while True:
                try:
                    await store.read("/atoll/health")
                    return
                except AtollError as error:
                    if child.returncode is not None:
                        why = f"etcd ended with {child.returncode} while starting"
                        raise StoreUnavailable(f"{why}. {self._last_words()}") from error
                    if time.monotonic() >= deadline:
                        why = f"etcd at {self.endpoint} did not become healthy within {_START_S:.0f} s"
                        raise StoreUnavailable(f"{why}. {self._last_words()}") from error
        finally:
            await store.close()

    def _command(self, binary: Path) -> list[str]:
        nowhere = "http://127.0.0.1:0"  # it wants to advertise a URL with a port; one member has nobody to tell
        return [
            str(binary),
            "--name=atoll",
            f"--data-dir={self._data_dir.absolute()}",
            f"--listen-client-urls=unix://{_CLIENT_SOCKET}",
            f"--advertise-client-urls={nowhere}",
            f"--listen-peer-urls=unix://{_PEER_SOCKET}",
            f"--initial-advertise-peer-urls={nowhere}",
            f"--initial-cluster=atoll={nowhere}",
            "--enable-grpc-gateway=false",  # JSON over HTTP, which nobody asks for
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",
            f"--quota-backend-bytes={_QUOTA_BYTES}",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
        ]

    def _last_words(self) -> str:
        """The end of the log, for an error message."""
        with self._log.open("rb") as log:
            log.seek(max(self._log_begins, log.seek(0, os.SEEK_END) - 16_384))
            lines = [_said(line) for line in log.read().decode(errors="replace").splitlines()[-5:]]
        return f"Last lines of {self._log}:\n" + "\n".join(lines) if lines else f"It wrote nothing to {self._log}"


def _said(line: str) -> str:
    """Return the readable part of a line of etcd's log, which is JSON with a stack trace in it, or plain text."""
    try:
        record = json.loads(line)
        return " ".join(str(record[name]) for name in ("level", "msg", "error") if name in record)
    except (ValueError, TypeError):
        return line[:500]


def _locked(data_dir: Path) -> bool:
    """Return True if a live etcd has locked the data. A second one would wait in silence for the lock."""
    try:
        with (data_dir / "member" / "snap" / "db").open("rb+") as database:
            fcntl.flock(database, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no data yet; or data that etcd cannot open either, which it says better
        return False
    return False
