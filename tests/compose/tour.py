"""docker-compose.yml, run for real: bring it up, train, kill an agent's container on the way, see the job end well.

    python tests/compose/tour.py [--keep]

1. Build the images; start etcd, controller and three agents under a project name of their own, mutual TLS throughout.
2. `submit` trains examples/mnist_cnn.py on 1:3 workers. Wait until it trains on all three.
3. Kill the container of one agent (SIGKILL). The job must go on with the other two, from where it was, in a newer view.
4. Start that container again. The job must grow back to three workers, unless it is over by then.
5. The job must end DONE with the model trained, and `submit` with exit code 0.
6. A script that trains a model of torch.compile, compiled_model.py, must end with exit code 0 as well.

Containers, networks and volumes are gone in the end, however it ends; --keep leaves them. Exit code 0: as it should be;
77: skipped, with the reason (no engine, no base image); anything else: failed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NoReturn, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
SKIPPED: Final = 77
VICTIM: Final = "agent2"
JOB: Final = "mnist"  # the name that docker-compose.yml's submit gives it
TRAINS_AT_STEP: Final = 30
BUILD_DEADLINE_S: Final = 1200
JOB_DEADLINE_S: Final = 420
COMPILED_DEADLINE_S: Final = 300
BEGAN_S: Final = time.monotonic()

T = TypeVar("T")


class Skip(Exception):
    """This machine cannot run containers; the message says why."""


class Failed(Exception):
    """The stack did not do what it should."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN_S:6.1f} s] {text}", flush=True)


def run(command: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None) -> bytes:
    """A command's stdout. Raises Failed with the end of what it said where it fails."""
    done = subprocess.run(command, capture_output=True, timeout=deadline_s, env=environment, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace")[-3000:]
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{said}")
    return done.stdout


def wait_until(what: str, deadline_s: float, look: Callable[[], T | None]) -> T:
    """Look until there is something. Raises Failed naming what was waited for."""
    ends_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while time.monotonic() < ends_s:
        found = look()
        if found is not None:
            return found
        pause.wait(0.3)
    raise Failed(f"not within {deadline_s:.0f} s: {what}")


def compose_command() -> tuple[str, ...]:
    """This machine's compose. Raises Skip where no engine answers or no base image can be had."""
    docker = shutil.which("docker")
    if docker is None:
        raise Skip("no `docker` on PATH")
    info = subprocess.run([docker, "info"], capture_output=True, text=True, timeout=30, check=False)
    if info.returncode != 0:
        raise Skip(f"no container engine answers: {info.stderr.strip()[-200:]}")
    base = os.environ.get("ATOLL_BASE", "debian:bookworm-slim")
    if subprocess.run([docker, "image", "inspect", base], capture_output=True, timeout=30, check=False).returncode:
        pulled = subprocess.run([docker, "pull", base], capture_output=True, text=True, timeout=300, check=False)
        if pulled.returncode != 0:
            raise Skip(f"base image {base} is not here and cannot be pulled: {pulled.stderr.strip()[-200:]}")
    if subprocess.run([docker, "compose", "version"], capture_output=True, timeout=30, check=False).returncode == 0:
        return docker, "compose"
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise Skip("neither `docker compose` nor `docker-compose` is installed")


class Stack:
    """The compose project, under a name of its own."""

    def __init__(self, compose: Sequence[str], folder: Path) -> None:
        project = f"atoll-tour-{uuid.uuid4().hex[:8]}"
        self._compose = (*compose, "--file", str(ROOT / "docker-compose.yml"), "--project-name", project)
        # Port 0: any free one, so that a stack that runs already is not in the way.
        self._environment = {**os.environ, "ATOLL_PORT": "0"}
        self._tls = folder / "tls"
        self._tls.mkdir(mode=0o700)

    def compose(self, *arguments: str, deadline_s: float) -> bytes:
        return run((*self._compose, *arguments), deadline_s, self._environment)

    def up(self) -> None:
        """Build, start, and wait until the controller serves and three agents have joined."""
        self.compose("build", deadline_s=BUILD_DEADLINE_S)
        say("images are built")
        self.compose("up", "--detach", deadline_s=120)
        tar = self.compose(
            *("run", "--rm", "-T", "--no-deps", "--entrypoint", "tar", "submit", "-C", "/etc/atoll/tls", "-c", "."),
            deadline_s=60,
        )
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for name in ("ca.pem", "cert.pem", "key.pem"):
                content = archive.extractfile(f"./{name}")
                if content is None:
                    raise Failed(f"the client's identity has no file {name}")
                (self._tls / name).write_bytes(content.read())

    def client(self, *arguments: str) -> str:
        """What `atoll ...` on this machine says of the cluster, through the published port. Raises Failed."""
        published = self.compose("port", "controller", "7700", deadline_s=30).decode().strip()
        command = (sys.executable, "-m", "atoll.cli.main", "--controller", published, *arguments)
        return run(command, 60, {**os.environ, "ATOLL_TLS_DIR": str(self._tls)}).decode()

    def ask(self, *arguments: str) -> dict[str, Any] | None:
        """What `atoll ... --json` says; None while it has no answer yet."""
        try:
            answer: dict[str, Any] = json.loads(self.client(*arguments, "--json"))
        except Failed:
            return None  # not serving yet, or no such job yet: whoever asks has a deadline
        return answer

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "--quiet", service, deadline_s=30).decode().split()[0]

    @contextmanager
    def submitted(self, output: IO[str]) -> Iterator[subprocess.Popen[str]]:
        """The one-shot `submit` service; ended and reaped when the block is left."""
        command = (*self._compose, "run", "--rm", "-T", "submit")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, env=self._environment
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=15)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", deadline_s=120)


def training_on(job: dict[str, Any] | None, nodes: set[str], after_step: int) -> dict[str, Any] | None:
    """The job, if its workers are on exactly these nodes and its step is past `after_step`."""
    if job is None or job["phase"] != "running" or job["progress"] is None:
        return None
    here = {worker["node"] for worker in job["workers"]}
    return job if here == nodes and job["progress"]["step"] > after_step else None


def check_end(stack: Stack, killed_at: int) -> None:
    """Raise Failed unless the job is done, went on from where it was when the agent died, and has learnt."""
    end = stack.ask("status", JOB)
    if end is None or end["phase"] != "done":
        raise Failed(f"the job is {end and end['phase']}, not done: {end and end['reason']}")
    # In place, as events tell; or as a new run, as its ranks do. What began anew would get there too, in time.
    told = stack.client("logs", JOB) + stack.client("events", JOB)
    resumed = [
        int(step) for step in re.findall(r"(?:resumes|continued in place after [0-9.]+ s) from step (\d+)", told)
    ]
    if not resumed or min(resumed) < killed_at:
        raise Failed(f"killed past step {killed_at}, but it went on from steps {resumed}:\n{told[-3000:]}")
    say(f"it went on from steps {resumed}")
    accuracy = end["progress"]["metrics"].get("accuracy", 0.0)
    if not accuracy > 0.9:
        raise Failed(f"accuracy {accuracy:.3f} after training; at least 0.9 is normal")
    say(f"done: run {end['run']}, step {end['progress']['step']}, accuracy {accuracy:.2%}, `submit` exit code 0")


def check_compiled(stack: Stack) -> None:
    """Raise Failed unless a worker in the image trains a compiled model."""
    here = Path(__file__).with_name("compiled_model.py")
    command = ("submit", f"/scripts/{here.name}", "--name=compiled", "--workers=1", "--follow")
    mounted = ("--volume", f"{here.parent}:/scripts:ro")
    stack.compose("run", "--rm", "-T", *mounted, "submit", *command, deadline_s=COMPILED_DEADLINE_S)
    said = stack.client("logs", "compiled")
    told = re.search(r"compiled \d+ libraries.*", said)
    if told is None:
        raise Failed(f"the script does not say what it compiled:\n{said[-3000:]}")
    say(told.group())


def tour(stack: Stack, folder: Path) -> None:
    everyone = {"agent1", "agent2", "agent3"}

    def all_joined() -> bool | None:
        reply = stack.ask("nodes")
        return (reply is not None and {n["name"] for n in reply["nodes"] if n["connected"]} == everyone) or None

    stack.up()
    wait_until("three agents joined", 90, all_joined)
    say("etcd, controller and three agents are up")

    with (folder / "submit.log").open("w+") as log, stack.submitted(log) as submit:

        def seen(check: Callable[[dict[str, Any] | None], T | None]) -> Callable[[], T | None]:
            def look() -> T | None:
                job = stack.ask("status", JOB)
                found = check(job)
                if found is None and (submit.poll() is not None or (job and job["phase"] in {"failed", "cancelled"})):
                    log.seek(0)
                    raise Failed(f"the job is over too early: {job and job['reason']}\n{log.read()[-3000:]}")
                return found

            return look

        first = wait_until("training on three nodes", 120, seen(lambda job: training_on(job, everyone, TRAINS_AT_STEP)))
        say(f"step {first['progress']['step']}: trains on all three, shares {[w['share'] for w in first['workers']]}")

        victim = stack.container(VICTIM)
        run(("docker", "kill", victim), 30)
        killed_s = time.monotonic()
        killed_at = first["progress"]["step"]
        say(f"{VICTIM} is killed")
        rest = wait_until(
            f"the job goes on without {VICTIM}", 90, seen(lambda job: training_on(job, everyone - {VICTIM}, killed_at))
        )
        took_s = time.monotonic() - killed_s
        where = f"step {rest['progress']['step']}, view {rest['view']} of run {rest['run']}"
        say(f"{where}: goes on with the rest, {took_s:.1f} s after the kill")
        if (rest["run"], rest["view"]) <= (first["run"], first["view"]):
            raise Failed(f"view {rest['view']} of run {rest['run']} is not newer: a lost worker must leave it")

        run(("docker", "start", victim), 30)
        say(f"{VICTIM} is back")
        regrown_at = rest["progress"]["step"]

        def regrown(job: dict[str, Any] | None) -> dict[str, Any] | None:
            return job if job and job["phase"] == "done" else training_on(job, everyone, regrown_at)

        again = wait_until("three nodes again, or done", 120, seen(regrown))
        grew = "over before it could grow" if again["phase"] == "done" else "three workers again"
        say(f"step {again['progress']['step']}, view {again['view']} of run {again['run']}: {grew}")

        exit_code = submit.wait(timeout=JOB_DEADLINE_S)
        log.seek(0)
        said = log.read()
    if exit_code != 0:
        raise Failed(f"`submit` ended with {exit_code}:\n{said[-3000:]}")
    check_end(stack, killed_at)
    check_compiled(stack)
    print(re.sub(r"(?m)^", "    | ", said[-1500:]))


def stop(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # through every `finally`, so that nothing is left running


def main() -> int:
    parser = argparse.ArgumentParser(description="Run docker-compose.yml for real, with an agent killed on the way.")
    parser.add_argument("--keep", action="store_true", help="leave the stack as it is in the end")
    keep = parser.parse_args().keep
    signal.signal(signal.SIGTERM, stop)
    try:
        command = compose_command()
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    with tempfile.TemporaryDirectory(prefix="atoll-tour-") as folder:
        stack = Stack(command, Path(folder))
        try:
            tour(stack, Path(folder))
        except Failed as failure:
            print(f"FAILED: {failure}", flush=True)
            print(stack.compose("logs", "--tail", "40", deadline_s=60).decode(errors="replace"))
            return 1
        finally:
            if not keep:
                stack.down()
                say("all containers, networks and volumes of the tour are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
