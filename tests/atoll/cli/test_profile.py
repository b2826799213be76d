"""atoll profile, as a user runs it: real workers of a real script. And what it refuses before it starts any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.profiling.document import load_profile, read

ATOLL = (sys.executable, "-m", "atoll.cli.main")
SCRIPT = Path(__file__).parent / "scripts/profiled.py"
pytestmark = pytest.mark.timeout(700)

QUICK = ("--probes", "1", "--samples", "120", "--batch", "12:12")


def command(folder: Path, *args: str, env: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ATOLL, "profile", *args],
        cwd=folder, env={**env, "CUDA_VISIBLE_DEVICES": ""}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(folder: Path, *args: str, **env: str) -> tuple[int, str, str]:
    process = command(folder, *args, env={**os.environ, **env})
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_interrupted_at_the_probe_the_same_command_goes_on(tmp_path: Path) -> None:
    """1. Ctrl-C while the probe runs: exit code 130, its baseline is on disk. 2. The same command makes the
    probe. 3. No checkpoint was made: the script asks for one at every step, but a trial leaves nothing but the profile
    and its logs. (Each trial imports torch twice, which is what this test's time goes to.)"""
    path = tmp_path / "p.json"
    first = command(tmp_path, str(SCRIPT), *QUICK, "--out", "p.json")
    assert first.stderr is not None
    try:
        said = iter(first.stderr.readline, "")
        assert any(line.startswith("baseline") for line in said)
        first.send_signal(signal.SIGINT)
        rest = "".join(said)
        assert first.wait(timeout=60) == 130
    finally:
        first.kill()
        first.communicate(timeout=30)
    assert "interrupted. The same command goes on where it stopped: p.json" in rest
    begun = read(path)
    assert [len(begun.baselines), len(begun.probes)] == [1, 0]

    code, out, err = run(tmp_path, str(SCRIPT), *QUICK, "--out", "p.json")
    assert code == 0, err
    assert "p.json has 0 of 1 probes; going on" in err
    assert out.splitlines()[1].split() == ["SPARSITY", "12"]
    done = read(path)
    assert done.baselines == begun.baselines
    assert len(done.probes) == 1
    assert load_profile(path)["surrogate"]["batches"] == [12]
    assert {one.name for one in tmp_path.iterdir()} == {"p.json", "p.logs"}


def test_a_script_that_dies_is_quoted_and_its_log_named(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, str(SCRIPT), *QUICK, FAIL_AT="3")
    assert code == 1
    quoted = "".join(line for line in err.splitlines() if line.startswith("  | "))
    assert "RuntimeError: the script's own fault" in quoted, err
    said = err.splitlines()[-1]
    assert said.startswith(f"error: {SCRIPT} ended with exit code 1 (batch 12, dense, worker ")
    assert "own fault" in Path(tmp_path, said.rpartition("Its output: ")[2]).read_text()


def test_a_script_without_atoll_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('hello')\n")
    code, _, err = run(tmp_path, "plain.py")
    assert code == 2
    assert "plain.py ended without run.prepare; only scripts that train through atoll.init" in err
    assert (tmp_path / "plain.profile.logs/rank-1.log").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no script named. Give it: atoll profile train.py"),
        (["gone.py"], "script gone.py is not there"),
        (["."], "script . is no file"),
        (["t.py", "--probes", "0"], "--probes 0 must be 1 to 1000"),
        (["t.py", "--workers", "1"], "--workers 1 must be 2 to 64: one alone exchanges nothing"),
        (["t.py", "--samples", "0"], "--samples 0 must be at least 1"),
        (["t.py", "--batch", "64"], "--batch '64' is not MIN:MAX"),
        (["t.py", "--batch", "64:32"], "--batch '64:32' is not MIN:MAX"),
        (["t.py", "--config", "gone.toml"], "job file gone.toml is not there"),
        (["t.py", "--out", "t.py"], "profile t.py, as a whole"),
    ],
)
def test_bad_input_is_found_before_anything_is_started(runner: CliRunner, args: list[str], said: str) -> None:
    Path("t.py").write_text("raise SystemExit(3)\n")
    result = runner.invoke(app, ["profile", *args])
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert "starting" not in result.stderr


def test_a_missing_package_is_named_with_what_installs_it(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.py").write_text("")
    monkeypatch.setitem(sys.modules, "skopt", None)
    result = runner.invoke(app, ["profile", "t.py"])
    assert result.exit_code == 2
    assert "pip install 'atoll[profile]'" in result.stderr
