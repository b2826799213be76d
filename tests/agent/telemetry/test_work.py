"""Speed that devices measure of themselves. The programs are real processes; only GPUs are made up."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from atoll.agent.runtime.cuda_work import fastest
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


async def test_parts_of_a_gpu_are_measured_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process one MIG part; asked for two at once, it gave one rate, and none was known."""
    text = """
import json, os
names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
print(json.dumps([{"MIG-a": 1e12, "MIG-b": 2e12, "0": 7e12}[name] for name in names[: 1 if "MIG" in names[0] else 9]]))
"""
    program(tmp_path, text, monkeypatch)
    devices = [Device(n, "cuda", "x", 1, 1.0, visible_as=name) for n, name in enumerate(("MIG-a", "0", "MIG-b"))]
    assert [one.work_per_s for one in await measured(devices, None, asyncio.Event())] == [1e12, 7e12, 2e12]


def test_a_gpu_counts_by_its_fastest_format() -> None:
    """In float32 a gaming card does more than an A100. A V100 has no bfloat16. One without memory has 0."""
    tera = 1e12
    cards = {
        "RTX 4090": {torch.float32: 82, torch.bfloat16: 165, torch.float16: 165},
        "A100": {torch.float32: 19, torch.bfloat16: 312, torch.float16: 310},
        "V100": {torch.float32: 15, torch.float16: 112},
        "full": {},
    }

    def rate(name: str, dtype: torch.dtype) -> float:
        if dtype not in cards[name]:
            raise RuntimeError("not implemented for this device, or out of memory")
        return cards[name][dtype] * tera

    rates = {name: fastest(partial(rate, name)) / tera for name in cards}
    assert rates == {"RTX 4090": 165, "A100": 312, "V100": 112, "full": 0}
