"""Speed that devices measure of themselves. The programs are real processes; only GPUs are made up."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from atoll.agent.telemetry import work
from atoll.agent.telemetry.cpu_work import multiplications_per_s
from atoll.agent.telemetry.devices import Device
from atoll.agent.telemetry.work import measured, rates_from

CPU = Device(0, "cpu", "x", 1, 1.0)
GPUS = tuple(Device(n, "cuda", "RTX", 1, 0.5, visible_as=str(n + 2)) for n in range(2))


async def test_a_processor_measures_itself_and_its_speed_slows_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(work.DEADLINE_S, "cpu", 50.0)
    fast = (await measured([CPU], 1, asyncio.Event()))[0].work_per_s
    slowed = (await measured([Device(0, "cpu", "x", 1, 0.1)], 1, asyncio.Event()))[0].work_per_s
    assert fast > 1e8
    assert 0 < slowed < fast / 2  # a tenth; other tests run beside this one


def test_the_calculation_is_short() -> None:
    """It ends by itself: its budget, and one sample beyond."""
    assert multiplications_per_s() > 1e8
    assert work.DEADLINE_S["cpu"] > 1


async def test_measuring_ends_when_the_agent_is_asked_to_end() -> None:
    stop = asyncio.Event()
    stop.set()
    assert await measured([CPU], 1, stop) == (CPU,)


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the one that needs a GPU."""
    (folder / "made_up_gpus.py").write_text(text)
    monkeypatch.setattr(work, "_PROGRAMS", {"cuda": "made_up_gpus"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


async def test_gpus_are_measured_in_one_process_that_sees_them_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    text = """
import os
assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3" and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
assert "ATOLL_TOKEN" not in os.environ
print("[4e12, 2e12]")
"""
    program(tmp_path, text, monkeypatch)
    assert [gpu.work_per_s for gpu in await measured(GPUS, None, asyncio.Event())] == [2e12, 1e12]


async def test_a_program_that_fails_leaves_the_speed_unknown_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, "raise SystemExit('the driver is too old')", monkeypatch)
    assert [gpu.work_per_s for gpu in await measured(GPUS, None, asyncio.Event())] == [0.0, 0.0]
    assert "measuring the devices' speed failed: the driver is too old" in caplog.text


async def test_a_program_that_hangs_is_killed_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, "import threading\nthreading.Event().wait(60)", monkeypatch)
    monkeypatch.setattr(work, "DEADLINE_S", {"cuda": 0.3})
    assert await measured(GPUS, None, asyncio.Event()) == GPUS
    assert "was not measured within 0.3 s" in caplog.text


@pytest.mark.parametrize("printed", [b"", b"nonsense", b"[1.0]", b"[1.0, -1]", b"[NaN, 1]", b"[Infinity, 1]", b"7"])
def test_what_makes_no_sense_counts_as_not_measured(printed: bytes) -> None:
    assert rates_from(printed, 2) == [0.0, 0.0]
