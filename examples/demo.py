"""The tour in one command: a controller, three unequal agents, a real model, and a worker killed on the way.

`make demo` runs this. It starts everything on this machine, submits examples/mnist_cnn.py, kills one worker (SIGKILL)
while it trains, and leaves nothing running. Exits with the job's exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from atoll.client.client import Client

HERE = Path(__file__).resolve().parent
ATOLL = (sys.executable, "-P", "-m", "atoll.cli.main")  # -P: the installed one, whatever lies in this folder
SPEEDS = "1.0,0.6,0.3"


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def kill_one_worker(job: str, after_step: int, began_s: float, ended: threading.Event) -> None:
    """Wait until the job trains, then SIGKILL the worker of rank 1."""
    trains = False
    with Client(timeout_s=30) as client:
        while not ended.wait(0.2):
            seen = client.get(job)
            step = seen.progress.step
            if step and not trains:
                trains = True
                say(f"first steps {time.monotonic() - began_s:.0f} s after the demo's start")
            if step >= after_step and len(seen.workers) == 3:
                pid = seen.workers[1].status.pid
                say(f"killing the worker of rank 1 (pid {pid}) at step {step}; the job must go on")
                os.kill(pid, signal.SIGKILL)
                return


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atoll-demo-") as folder:
        say(f"starting a controller with its own etcd, and three agents of speeds {SPEEDS}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [*ATOLL, "up", "--speeds", SPEEDS, "--listen", address, "--data-dir", folder]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert up.stdout is not None
        try:
            ready = up.stdout.readline()
            if not ready.startswith("ready"):
                return up.wait(timeout=30) or 1
            print(ready, end="", flush=True)
            os.environ["ATOLL_CONTROLLER"] = address
            return train(began)
        finally:
            up.terminate()  # a shell may have it ignore Ctrl-C
            up.wait(timeout=30)
            up.stdout.close()


def train(began: float) -> int:
    say("submitting examples/mnist_cnn.py to all three")
    command = [
        *ATOLL,
        "submit",
        str(HERE / "mnist_cnn.py"),
        "--name",
        "demo",
        "--workers",
        "1:3",
        "--follow",
        "--",
        "--batch-size",
        "512",
    ]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    job = following.stdout.readline().strip()  # the job's id comes first
    ended = threading.Event()
    killer = threading.Thread(target=kill_one_worker, args=(job, 30, began, ended), name="kill-one-worker")
    killer.start()
    try:
        code = following.wait(timeout=1800)
    finally:
        ended.set()
        killer.join(timeout=60)
        following.stdout.close()
    say("what happened")
    subprocess.run([*ATOLL, "events", job], check=True, timeout=60)
    subprocess.run([*ATOLL, "status", job], check=True, timeout=60)
    say(f"done in {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
