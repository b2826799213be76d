"""The command as a whole: imports of help, exit codes, global options, completion; no traceback for a user's error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.group import hoist
from atoll.cli.main import app

ATOLL = (sys.executable, "-m", "atoll.cli.main")
COMMANDS = (
    *(
        "run",
        "up",
        "controller",
        "agent",
        "submit",
        "profile",
        "jobs",
        "status",
        "logs",
        "adjust",
        "cancel",
        "nodes",
        "events",
        "decide",
    ),
    *("simulate", "doctor", "certs", "version", "down", "resume", "restore", "top"),
)


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ATOLL, *args], capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
    )


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    """It comes at once: benchmarks/command_line.py says how soon."""
    code = "import sys; from atoll.cli.main import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *shown, modules = done.stdout.strip().split("\n")
    assert all(f" {command} " in "\n".join(shown) for command in COMMANDS)
    assert {"atoll.cli.commands.submit", "typer"} <= set(modules.split())
    assert not {"grpc", "numpy", "torch", "pydantic", "cryptography", "rich.live"} & set(modules.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"atoll {command}" in result.stdout


def test_no_command_shows_help(runner: CliRunner) -> None:
    for words, shown in (([], "submit"), (["certs"], "revoke")):
        result = runner.invoke(app, words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert shown in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["submti"], "error: No such command 'submti'. Did you mean 'submit'? See `atoll --help`"),
        (["plan", "optperf"], "error: No such command 'plan'. `atoll decide PLANNER` runs a planner"),
        (["jobs", "--nope"], "error: No such option: --nope"),
        (["status"], "error: Missing argument 'JOB'. See `atoll status --help`"),
        (["--timeout", "0", "jobs"], "error: --timeout 0 must be positive"),
        (["--timeout", "soon", "jobs"], "error: Invalid value for '--timeout'"),
        (["--controller", ",", "jobs"], "error: --controller ',' names none"),
        (["--controller", "a:b:c", "jobs"], "error: address 'a:b:c' is not HOST:PORT"),
        (["--tls-ca", "x", "jobs"], "error: --tls-cert and --tls-key missing"),
        (["--tls-ca=x", "--tls-cert=y", "--tls-key=z", "jobs"], "error: cannot read x: No such file or directory"),
        (["decide", "evn"], "error: no planner 'evn'. Did you mean 'even'?"),
        (["certs", "client", "nowhere", "ann"], "error: no authority in nowhere"),
        (["up", "--speeds", "1,2"], "error: --speeds '1,2': each must be above 0 and at most 1"),
        (["agent", "--token-file", "nope"], "error: token file nope cannot be read"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(runner: CliRunner, args: list[str], said: str) -> None:
    result = runner.invoke(app, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


def test_nobody_there_is_exit_3(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--controller", "127.0.0.1:1", "--timeout", "0.2", "jobs"])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: list jobs: no leading controller at 127.0.0.1:1 within 0.2 s")
    assert result.stderr.count("\n") == 1


def test_not_allowed_is_exit_4(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.refuse = grpc.StatusCode.PERMISSION_DENIED
    result = runner.invoke(app, ["--controller", controller.address, "jobs"])
    assert (result.exit_code, result.stderr) == (4, "error: list jobs: as the test asked\n")


def test_the_environment_names_controller_and_certificates(
    runner: CliRunner, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATOLL_CONTROLLER", f"127.0.0.1:1,{controller.address}")
    assert runner.invoke(app, ["jobs", "--json"]).stdout == '{"jobs": []}\n'
    monkeypatch.setenv("ATOLL_TLS_DIR", str(tmp_path / "nope"))
    result = runner.invoke(app, ["jobs"])
    assert result.exit_code == 2
    assert "ATOLL_TLS_DIR" in result.stderr
    assert runner.invoke(app, ["version"]).exit_code == 0  # what needs no controller does not mind


def test_global_options_may_stand_after_the_command(runner: CliRunner, controller: ScriptedController) -> None:
    assert runner.invoke(app, ["jobs", "--json", "--controller", controller.address]).exit_code == 0
    assert runner.invoke(app, ["jobs", f"--controller={controller.address}", "--json", "--timeout", "5"]).exit_code == 0


@given(st.lists(st.sampled_from(["jobs", "--json", "--controller", "h:1", "--controller=h", "--", "--tls-ca", "x"])))
def test_hoisting_keeps_every_word_and_leaves_the_scripts_alone(args: list[str]) -> None:
    moved = hoist(args)
    assert sorted(moved) == sorted(args)
    if "--" in args[1:] and args[args.index("--") - 1] not in ("--controller", "--tls-ca"):
        assert moved[moved.index("--") :] == args[args.index("--") :]


def test_hoisting() -> None:
    assert hoist(["submit", "t.py", "--controller", "h:1", "--", "--controller", "x"]) == [
        *("--controller", "h:1", "submit", "t.py"),
        *("--", "--controller", "x"),
    ]
    assert hoist(["jobs", "--tls-ca=x", "-a", "--controller"]) == ["--tls-ca=x", "--controller", "jobs", "-a"]


def test_completion_lists_commands_and_their_options() -> None:
    done = run(_ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll su", COMP_CWORD="1")
    assert done.stdout.split() == ["submit"]
    done = run(_ATOLL_COMPLETE="complete_bash", COMP_WORDS="atoll submit --che", COMP_CWORD="2")
    assert done.stdout.split() == ["--checkpoint-every", "--checkpoint-dir"]


def test_completion_can_be_shown() -> None:
    done = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "complete -o default -F _atoll_completion atoll" in done.stdout


def test_a_pipe_gets_no_colours_and_no_cut_lines(controller: ScriptedController) -> None:
    controller.script.add("vit-1", reason="waiting: " + "x" * 300)
    done = run("--controller", controller.address, "jobs", FORCE_COLOR="", COLUMNS="40")
    assert done.returncode == 0
    assert "x" * 300 in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_a_reader_that_goes_away_is_no_traceback(controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    controller.script.write(b"y\n" * 200_000)
    command = [*ATOLL, "--controller", controller.address, "logs", "vit-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


def test_version(runner: CliRunner) -> None:
    assert runner.invoke(app, ["version"]).stdout == "0.1.0\n"
    assert runner.invoke(app, ["version", "--json"]).stdout == '{"version": "0.1.0"}\n'


def test_a_planner_runs_from_json_to_json(runner: CliRunner) -> None:
    result = runner.invoke(app, ["decide", "even"], input="{}")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "even" in runner.invoke(app, ["decide"]).stdout
    assert runner.invoke(app, ["decide", "even"], input=b"\xff").stderr.startswith(
        "error: the input of even is not UTF-8"
    )
