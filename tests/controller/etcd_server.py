"""A real etcd for tests: its own data, loopback only, killable and startable again on the same ports."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from held_ports import free_port

from atoll.controller.state.etcd_binary import environment, find_etcd


class EtcdServer:
    """One member, or one of several. `tls` are etcd's own flags for the client port."""

    def __init__(self, folder: Path, tls: Sequence[str] = ()) -> None:
        self._folder = folder
        self._scheme = "https" if tls else "http"
        self._tls = tls
        self._client_port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"127.0.0.1:{self._client_port}"
        self.log = folder / "etcd.log"

    def start(self) -> None:
        client, peer = f"{self._scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(find_etcd().path),
                    "--name=test",
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=test={peer}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",  # it leads itself sooner, and leases of 1 s are granted
                    "--log-level=error",
                    *self._tls,
                ],
                stdout=log,
                stderr=log,
                env=dict(environment()),
            )
        self._wait_until_it_serves()

    def _wait_until_it_serves(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while not self._serves():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def _serves(self) -> bool:
        """Whether it has a leader; with TLS, whether it listens."""
        try:
            if self._tls:
                socket.create_connection(("127.0.0.1", self._client_port), timeout=5).close()
                return True
            asking = http.client.HTTPConnection("127.0.0.1", self._client_port, timeout=5)
            try:
                asking.request("GET", "/health")
                return b'"true"' in asking.getresponse().read()
            finally:
                asking.close()
        except OSError:
            return False

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """SIGKILL. What was acknowledged must be there after `start`."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(30)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
