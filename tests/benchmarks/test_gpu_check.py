"""The check of a GPU, run without one: stages end, are named where they fail, and none stops the next."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from gpu_check import race
from gpu_check.command import main, stage_environment
from gpu_check.processes import wait_for_all
from gpu_check.rows import Rows, read_rows
from gpu_check.runner import print_table, run_stages
from gpu_check.stages import STAGES, Stage
from racing.course import Course
from racing.domains import DOMAINS
from racing.task import domains_of

ROOT = Path(__file__).resolve().parents[2]
INJECTED = {
    "fine": "def run(device, rows):\n    rows.check('all well', True, device)\n",
    "wrong": "def run(device, rows):\n    rows.check('first', True)\n    raise ValueError('no such luck')\n",
    "hangs": """
import os, signal, subprocess, time
def run(device, rows):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    rows.check("began", True, f"{os.getpid()} {child.pid}")
    time.sleep(600)
""",
    "crashes": """
import os
def run(device, rows):
    rows.measure("dies alone", lambda: os._exit(7), 10.0)
    rows.measure("takes long", lambda: __import__("time").sleep(600), 0.2)
    os._exit(3)
""",
    "lacks": "def run(device, rows):\n    rows.skip('everything', 'no such device')\n",
}


@pytest.mark.timeout(60)
def test_a_stage_that_fails_hangs_or_crashes_is_named_and_does_not_stop_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Five stages: one raises, one ignores SIGTERM and has a child, one exits, one has nothing to do, one is fine.
    2. The table and the JSON name each with its reason. 3. No process of theirs is left."""
    monkeypatch.setattr("gpu_check.runner.ENDS_WITHIN_S", 0.2)
    monkeypatch.setattr("gpu_check.runner.CPU_FACTOR", 1.0)
    for name, text in INJECTED.items():
        (tmp_path / f"{name}.py").write_text(text)
    limits = {"hangs": 2.0}
    order = ("wrong", "hangs", "crashes", "lacks", "fine")
    stages = [Stage(number, name, limits.get(name, 30.0), name) for number, name in enumerate(order)]
    environment = stage_environment("cpu")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    results = run_stages(stages, "cpu", tmp_path, environment)
    print_table(results)
    assert {one.stage.title: one.outcome for one in results} == {
        "wrong": "failed",
        "hangs": "failed",
        "crashes": "failed",
        "lacks": "skipped",
        "fine": "passed",
    }
    reasons = [one.reason for one in results]
    assert reasons == [
        "the stage itself",
        "took more than 2 s",
        "its process ended with exit code 3; dies alone, takes long",
        "no such device",
        "",
    ]
    table = capsys.readouterr().out
    assert "no such luck" in table
    assert "its process ended with exit code 7" in table
    assert "took more than 0.2 s" in table
    assert table.rstrip().endswith("stages: 1 passed, 3 failed, 1 skipped")
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [one["outcome"] for one in written["stages"]] == [one.outcome for one in results]
    assert [state_of(int(pid)) for pid in results[1].rows[0].text.split()] == ["ended", "ended"]


def state_of(pid: int) -> str:
    """Return the state of a process. An orphan that was killed has ended, and is a zombie until init looks at it."""
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "ended"
    return "ended" if state == psutil.STATUS_ZOMBIE else state


def test_a_stage_without_time_is_skipped(tmp_path: Path) -> None:
    (result,) = run_stages([Stage(0, "late", 30.0, "late")], "cpu", tmp_path, {}, whole_limit_s=5.0)
    assert (result.outcome, result.reason) == ("skipped", "no time was left for it")


def test_the_command_runs_without_a_gpu(tmp_path: Path) -> None:
    """The stage of kernels: its table is printed last, and written as JSON."""
    command = [
        sys.executable,
        str(ROOT / "scripts/gpu-check"),
        "--device",
        "cpu",
        "--stages",
        "2",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stages: 1 passed, 0 failed, 0 skipped" in done.stdout
    (stage,) = json.loads((tmp_path / "gpu-check.json").read_text())["stages"]
    rows = {row["name"]: row for row in stage["rows"]}
    assert rows["threshold_block"]["figures"]["gb_per_s_100003"] > 0
    assert {row["outcome"] for row in stage["rows"]} == {"passed"}


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--stages", "0,77"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "no stage 77; there are 0, 1" in capsys.readouterr().err


SLEEPS, FAILS, ENDS = "import time; time.sleep(600)", "raise SystemExit(3)", ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("texts", "limit_s", "codes"),
    [
        ((ENDS, ENDS), 600.0, [0, 0]),
        ((SLEEPS, FAILS), 600.0, [None, 3]),
        ((FAILS, SLEEPS), 600.0, [3, None]),
        ((ENDS, SLEEPS), 1.0, [0, None]),
    ],
    ids=["all end", "the second fails", "the first fails", "one is late"],
)
def test_ranks_are_waited_for_until_one_fails_or_is_late(
    texts: tuple[str, str], limit_s: float, codes: list[int | None]
) -> None:
    """A rank whose peer has failed waits for it for minutes."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", text]) for text in texts]
    try:
        wait_for_all(processes, limit_s)
        assert [one.poll() for one in processes] == codes
    finally:
        for one in processes:
            one.kill()
            one.wait()


def test_stages_are_numbered_once() -> None:
    assert len({stage.number for stage in STAGES}) == len(STAGES)


def test_the_race_leaves_a_row_for_each_method_and_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Domains of random text lie in the cache, and nothing is fetched. 2. Three methods race four steps. 3. Their
    rows have bytes as the methods send them, and an older check's laps are not taken for this one's."""
    random = np.random.default_rng(0)
    (tmp_path / "atoll-benchmarks").mkdir()
    for name in DOMAINS:
        texts = {part: random.integers(97, 123, 5000, np.uint8) for part in ("train", "held_out")}
        np.savez(tmp_path / "atoll-benchmarks" / f"island-lm-{name}.npz", **texts)  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(race, "CACHE", tmp_path)
    monkeypatch.setattr(race, "METHODS", ("ddp", "local-steps", "powersgd-2"))  # the others exchange nothing so early
    monkeypatch.setitem(race.COURSES, "cpu", Course("XXS", "P1", islands=4, steps=4, judge_every=1, seed=0))
    (tmp_path / "race.json").write_text("of another check")
    domains_of.cache_clear()
    try:
        race.run("cpu", Rows(tmp_path / "rows", tmp_path))
    finally:
        domains_of.cache_clear()
    rows = {row.name: row for row in read_rows(tmp_path / "rows")}
    assert [row.outcome for row in rows.values()] == ["passed"] * len(rows)
    assert {*rows} == {"a step", *race.METHODS, "plot"}
    assert math.isclose(rows["ddp"].figures["sent"], 6.0)  # a ring of four: 2 x 3 / 4 of four bytes
    assert 0 < rows["local-steps"].figures["sent"] < 0.2
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
