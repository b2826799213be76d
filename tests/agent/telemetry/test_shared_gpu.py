"""Agents that share a GPU: measured once, by a real process, under a lock that real agents' descriptors hold."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.agent.telemetry import work
from atoll.agent.telemetry.devices import Device
from atoll.agent.telemetry.shared_gpu import lock_files
from atoll.agent.telemetry.work import measured

GPU = Device(0, "cuda", "RTX", 8 << 30, 1.0, visible_as="0", uuid="GPU-77", sharers=3)
PROGRAM = """
import os, sys, time
from atoll.agent.telemetry.shared_gpu import shared_rate

def measure():
    others = os.open(os.environ["MEASURING"], os.O_CREAT | os.O_EXCL)  # fails where another measures meanwhile
    with open(os.environ["RATES"], "a+") as file:
        file.seek(0)
        number = len(file.readlines()) + 1
        print(os.getpid(), file=file)
    time.sleep(float(os.environ["TAKES_S"]))
    os.unlink(os.environ["MEASURING"])
    return number * 3e12

print([shared_rate(int(sys.argv[1]), measure)])
"""


@pytest.fixture(autouse=True)
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with a line for each measurement: the first gives 3e12, the second 6e12."""
    (tmp_path / "made_up_gpu.py").write_text(PROGRAM)
    monkeypatch.setattr(work, "_PROGRAMS", {"cuda": "made_up_gpu"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("RATES", str(tmp_path / "rates"))
    monkeypatch.setenv("MEASURING", str(tmp_path / "measuring"))
    monkeypatch.setenv("TAKES_S", "0.2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "rates"


@pytest.fixture
def agents() -> Iterator[ExitStack]:
    """Holds the files of agents that live."""
    with ExitStack() as living:
        yield living


async def rate(agents: ExitStack) -> float:
    """Return what one more agent announces."""
    (found,) = await measured([GPU], None, asyncio.Event(), agents.enter_context(lock_files([GPU])))
    return found.work_per_s


async def test_a_shared_gpu_is_measured_once_while_no_other_agent_has_it(agents: ExitStack, rates: Path) -> None:
    """1. Three agents start at once: each would measure a third of the GPU, and announce a ninth. 2. One measures, and
    all announce a third. 3. So does one that comes later, while training keeps the GPU busy. 4. Once all have gone the
    next one measures anew."""
    assert await asyncio.gather(*(rate(agents) for _ in range(3))) == [1e12] * 3
    assert await rate(agents) == 1e12
    (_,) = rates.read_text().splitlines()  # noqa: ASYNC240
    agents.close()
    assert await rate(agents) == 2e12


async def test_an_agent_whose_measurement_is_killed_keeps_no_other_from_measuring(
    agents: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAKES_S", "600")
    monkeypatch.setitem(work.DEADLINE_S, "cuda", 5.0)
    assert await rate(agents) == 0.0
    (tmp_path / "measuring").unlink()
    monkeypatch.setenv("TAKES_S", "0")
    monkeypatch.setitem(work.DEADLINE_S, "cuda", 60.0)
    assert await rate(agents) == 2e12


async def test_an_agent_that_is_killed_holds_no_lock(agents: ExitStack, tmp_path: Path) -> None:
    text = (
        "import fcntl, os, sys; file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "atoll-GPU-77.lock")]
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert other.stdout is not None
    assert await other.stdout.readline() == b"locked\n"
    later = asyncio.create_task(rate(agents))
    await asyncio.sleep(0)  # it begins
    other.kill()
    assert await later == 1e12
    await other.wait()


def test_a_file_that_another_put_there_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "atoll-GPU-77.lock").symlink_to(tmp_path / "elsewhere")
    with lock_files([GPU]) as files:
        assert files == {}
    assert not (tmp_path / "elsewhere").exists()
    assert "cannot be used" in caplog.text
