"""Starts and stops an `atoll up` in the background."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from atoll.cli.cluster.local_cluster import READY_WITHIN_S, holder, is_up, last_line
from atoll.cli.render import terminal
from atoll.errors import AtollError, Conflict, DeadlineExceeded

_SPARE_S: Final = 15.0
_END_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1


def start(data: Path, listen: str, speeds: Sequence[float], threads: int | None, *, share_gpu: bool) -> None:
    """Return when all agents are connected. Raises AtollError with its last line where it ends before."""
    if is_up(data):
        raise Conflict(f"another `atoll up` runs with --data-dir {data}. `atoll down` stops it, or name another folder")
    log = data / "logs" / "up.log"
    options = ["--listen", listen, "--data-dir", str(data), "--speeds", ",".join(f"{speed:g}" for speed in speeds)]
    options += ["--threads", str(threads)] if threads else []
    options += ["--share-gpu"] if share_gpu else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "atoll.cli.main", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal that is closed ends it no more
        )
    try:
        ready, *more = _said_when_ready(process, log)
    except BaseException:
        process.terminate()
        process.wait(_END_WITHIN_S)
        raise
    print(ready, flush=True)  # it goes on whether anybody reads this or not
    for line in more:
        terminal.note(line)
    terminal.note("  stop   atoll down" + ("" if data == Path("~/.atoll").expanduser() else f" --data-dir {data}"))


def _said_when_ready(process: subprocess.Popen[bytes], log: Path) -> list[str]:
    ends_s = time.monotonic() + READY_WITHIN_S + _SPARE_S
    ended = False
    while True:
        said = log.read_text(errors="replace")
        if said.startswith("ready") and "  logs " in said:
            return [line for line in said.splitlines() if "Ctrl-C" not in line]
        if ended:
            raise AtollError(f"`atoll up` ended with exit code {process.returncode}: {last_line(log)}. Its log: {log}")
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(f"`atoll up` was not ready in time. Its log: {log}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_EVERY_S)
            ended = True


def stop(data: Path) -> bool:
    """End the `atoll up` that has this data directory, also one that is not in the background; False: none has.

    Raises DeadlineExceeded where it does not end."""
    with holder(data) as process:
        if process is None:
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _END_WITHIN_S)[0]:
            raise DeadlineExceeded(f"`atoll up` on {data} did not end within {_END_WITHIN_S:g} s. See {data / 'logs'}")
    return True
