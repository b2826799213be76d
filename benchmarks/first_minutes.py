"""Times a newcomer's first minutes on a machine without a compiler: installed from wheels, a cluster, a job, the page.

python benchmarks/first_minutes.py [--wheel dist/atoll-...whl] [--image IMAGE] [--parts install,demo,run]

`install`: in a container of that image, which has Python and no compiler, pip installs from a folder of wheels (filled
before, not timed: that is downloads); then `atoll up`, transformers' Trainer as a job, and `atoll dashboard` opened by
Chromium. `demo`: `make demo` in a fresh clone, with that wheel. `run`: in a fresh environment with that wheel, `atoll
run` of the README's script, three times with an empty home and loopback device (`unshare -rn`), from the command to the
first loss. Exit code 2: no wheel, engine or Chromium here.

Without a registry: debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm FOLDER,
then tar -C FOLDER -c . | docker import - bare, and --image bare.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lab.machine import processor

ROOT: Final = Path(__file__).resolve().parent.parent
EXTRAS: Final = "controller,agent,huggingface,dashboard"
ATOLL: Final = "/new/bin/atoll"
LIMIT_S: Final = 1200.0
GOAL_S: Final = 60.0
"""Of `make demo`'s set-up with a wheel."""
FIRST_LOSS_GOAL_S: Final = 90.0
"""From `atoll run` to the first loss of the user's own script."""


class Container:
    """A fresh container in this machine's network, with the wheels in /house and the examples in /examples."""

    def __init__(self, image: str, house: Path) -> None:
        mounts = (f"--volume={house}:/house:ro", f"--volume={ROOT / 'examples'}:/examples:ro")
        options = ("--rm", "--detach", "--init", "--network=host", "--shm-size=1g", "--env=HOME=/root", *mounts)
        self._id = output("docker", "run", *options, image, "sleep", "infinity")

    def command(self, *words: str) -> list[str]:
        return ["docker", "exec", self._id, *words]

    def run(self, *words: str) -> str:
        return output(*self.command(*words))

    def close(self) -> None:
        output("docker", "kill", self._id)


def output(*command: str | Path) -> str:
    """What it prints, or this program's end with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\n{' '.join(map(str, command))} failed")
    return done.stdout.strip()


@contextmanager
def timed(what: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    print(f"{what:64} {time.monotonic() - began_s:6.1f} s", flush=True)


def fill(house: Path, wheel: Path) -> None:
    """With all that is installed, at the versions of constraints.txt."""
    pins = ("--constraint", ROOT / "constraints.txt")
    output(sys.executable, "-m", "pip", "download", "--quiet", "--dest", house, *pins, f"{wheel}[{EXTRAS}]")


def install(wheel: Path, image: str, chromium: str) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-house-") as scratch:
        house = Path(scratch)
        fill(house, wheel)
        sizes = [path.stat().st_size for path in house.iterdir()]
        print(f"wheel {wheel.stat().st_size / 1e6:.1f} MB; house: {len(sizes)} wheels, {sum(sizes) / 1e6:.0f} MB")
        container = Container(image, house)
        try:
            compilers = container.run("sh", "-c", "command -v cc c++ gcc g++ clang nvcc make || true")
            print(f"in a container of {image}, compilers there: {compilers or 'none'}", flush=True)
            began_s = time.monotonic()
            with timed("python3 -m venv"):
                container.run("python3", "-m", "venv", "/new")
            with timed(f"pip install atoll[{EXTRAS}]"):
                quiet = ("--quiet", "--no-index", "--find-links=/house")
                container.run("/new/bin/pip", "install", *quiet, f"/house/{wheel.name}[{EXTRAS}]")
            with timed("atoll up --agents 2 --detach, until both are there"):
                container.run(ATOLL, "up", "--agents", "2", "--detach")
            with timed("a job of transformers' Trainer, two workers: submitted to done"):
                script = ("/examples/huggingface_trainer.py", "--workers", "2", "--follow")
                container.run(ATOLL, "submit", *script, "--", "--epochs", "20")
            with timed("atoll dashboard: asked for, to the job's row in Chromium"):
                look(container, chromium)
            print(f"{'all of it':64} {time.monotonic() - began_s:6.1f} s")
            print(f"environment: {container.run('du', '-sm', '/new').split()[0]} MB")
            container.run(ATOLL, "down")
        finally:
            container.close()


def look(container: Container, chromium: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    command = container.command(ATOLL, "dashboard", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as served:
        try:
            assert served.stdout is not None
            address = served.stdout.readline().strip()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page()
                page.goto(address)
                expect(page.locator("td.done")).to_be_visible(timeout=LIMIT_S * 1e3)
                browser.close()
        finally:
            served.terminate()  # of `docker exec`; the process ends with its container


def demo(wheel: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-clone-") as scratch:
        output("git", "clone", "--quiet", ROOT, f"{scratch}/atoll")
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        began_s = time.monotonic()
        command = ("make", "--no-print-directory", "demo", f"WHEEL={wheel}")
        with subprocess.Popen(
            command, cwd=f"{scratch}/atoll", env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                at_s = time.monotonic() - began_s
                if line.startswith("=== starting"):
                    print(f"{f'make demo WHEEL=...: set up (goal {GOAL_S:.0f} s)':64} {at_s:6.1f} s", flush=True)
                if line.startswith("=== first steps"):
                    print(f"{'make demo: first steps':64} {at_s:6.1f} s", flush=True)
        print(f"{'make demo: ended':64} {time.monotonic() - began_s:6.1f} s, exit code {running.returncode}")


def first_loss(wheel: Path, repetitions: int = 3) -> None:
    readme = (ROOT / "README.md").read_text()
    script = re.search(r"^cat > train.py <<'EOF'\n(.*?)^EOF$", readme, re.MULTILINE | re.DOTALL)
    assert script is not None
    with tempfile.TemporaryDirectory(prefix="atoll-run-") as scratch:
        with timed("python3 -m venv"):
            output(sys.executable, "-m", "venv", f"{scratch}/new")
        pins = ("--constraint", ROOT / "constraints.txt")
        with timed("pip install atoll[all], with downloads"):
            output(f"{scratch}/new/bin/pip", "install", "--quiet", *pins, f"{wheel}[all]")
        for number in range(repetitions):
            home = Path(scratch, f"home-{number}")
            home.mkdir()
            (home / "train.py").write_text(script[1])
            run_once(f"{scratch}/new/bin/atoll", home)


def run_once(atoll: str, home: Path) -> None:
    """Print when `atoll run` says that the job is submitted, shows its first loss and ends. Ends the cluster."""
    command = f"ip link set lo up && {atoll} run train.py; code=$?; {atoll} down >&2; exit $code"
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | {"HOME": str(home)}
    began_s, seen = time.monotonic(), dict[str, float]()
    with subprocess.Popen(
        ("unshare", "-rn", "sh", "-c", command),
        cwd=home,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            for what, pattern in (
                ("submitted", r"dashboard: "),
                ("first loss", r".*\bloss "),
                ("done", r".* done: step"),
            ):
                if what not in seen and re.match(pattern, line):
                    seen[what] = time.monotonic() - began_s
    told = ", ".join(f"{what} {at_s:.1f} s" for what, at_s in seen.items())
    what = f"atoll run train.py (first loss: goal {FIRST_LOSS_GOAL_S:.0f} s)"
    print(f"{what:64} {told}, exit code {running.returncode}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="what `make wheels` made for the image's Python")
    parser.add_argument("--image", default="python:3.11-slim-bookworm")
    parser.add_argument("--parts", default="install,demo")
    options = parser.parse_args()
    made = sorted((ROOT / "dist").glob("atoll-*-manylinux*.whl"))
    if not options.wheel and not made:
        print("no wheel in dist/: `make wheels` makes it. Nothing was measured")
        return 2
    chromium, wheel = shutil.which("chromium"), (options.wheel or made[0]).resolve()
    print(f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}", flush=True)
    if "install" in options.parts:
        engine = shutil.which("docker")
        if engine is None or subprocess.run((engine, "info"), capture_output=True, check=False, timeout=60).returncode:
            print("no container engine answers: nothing was measured")
            return 2
        if chromium is None:
            print("no Chromium here: nothing was measured")
            return 2
        install(wheel, options.image, chromium)
    if "demo" in options.parts:
        demo(wheel)
    if "run" in options.parts:
        first_loss(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
