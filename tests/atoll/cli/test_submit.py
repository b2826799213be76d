"""submit: bad input is found before any connection, flags become the spec, following ends as the job does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_controller import ScriptedController
from typer.testing import CliRunner, Result

from atoll.cli.main import app
from atoll.cli.render import follow
from atoll.cli.render.follow import culprit
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

NOBODY = "127.0.0.1:1"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def submit(runner: CliRunner, controller: ScriptedController, *args: str) -> Result:
    return runner.invoke(app, ["--controller", controller.address, "submit", *args])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "error: no script named. Give it: atoll submit train.py"),
        (["nope.py"], "error: script nope.py is not there. Check the path"),
        (["."], "error: script . is a folder. Name the Python file"),
        (["train.py", "--workers", "4:2"], "error: workers = '4:2' has a minimum of 4 above its maximum of 2"),
        (["train.py", "--adapt-sparsity"], "error: `--adapt-sparsity` belongs to strategy stale-sparse; you chose"),
        (["train.py", "--adapt-batch", "64"], "error: --adapt-batch '64' is not MIN:MAX"),
        (["train.py", "--workers", "many"], "error: workers = 'many' must be N or 'MIN:MAX'"),
        (["train.py", "--name", "My Job"], "error: name = 'My Job' must be 1 to 40 of a-z"),
        (
            ["train.py", "--split", "fair"],
            "error: split = 'fair' is wrong: it should be 'auto', 'inverse-time' or 'even'",
        ),
        (
            ["train.py", "--strategy", "ring"],
            "error: strategy = 'ring' is not known. Use one of auto, dense, stale-sparse",
        ),
        (
            ["train.py", "--sparsity", "0.9"],
            "error: `--sparsity` belongs to strategy stale-sparse; you chose none. Say --strategy stale-sparse",
        ),
        (["train.py", "--keep", "0"], "error: checkpoint.keep = 0 is wrong"),
        (["train.py", "--env", "A"], "error: --env 'A' is not NAME=VALUE"),
        (["train.py", "--checkpoint-dir", "rel"], "error: checkpoint.directory = 'rel' must be an absolute path"),
        (["train.py", "--workdir", "gone"], "error: folder gone is not there"),
        (["train.py", "--config", "gone.toml"], "error: job file gone.toml is not there"),
        (["train.py", "--requirements", "gone.txt"], "error: requirements gone.txt are not there"),
        (["-m", "gone.train"], "error: module gone.train is not in "),
        (["-m", "no-name"], "error: module = 'no-name' is no name of a module"),
        (["train.py", "--follow-for", "0"], "error: --follow-for 0 must be positive"),
        (["train.py", "--lr", "0.1"], "error: No such option: --lr"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_before_any_connection(
    runner: CliRunner, script: Path, args: list[str], said: str
) -> None:
    result = runner.invoke(app, ["--controller", NOBODY, "submit", *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "where", "excerpt"),
    [
        (b"import os\n\nprint('x'\n", "line 3: '(' was never closed", "print('x'\n     ^"),
        (b"if True:\n    for x in 3 4:\n        pass\n", "line 2: invalid syntax", "for x in 3 4:\n           ^"),
        (
            b"def f():\nreturn 1\n",
            "line 2: expected an indented block after function definition on line 1",
            "return 1\n^",
        ),
        (b"return 1\n", "line 1: 'return' outside function", "return 1\n^"),
        (b"x = '\xff'\n", "line 1: (unicode error) 'utf-8' codec can't decode byte 0xff", ""),
    ],
)
def test_a_syntax_error_is_refused_before_any_connection_with_its_line_and_a_caret(
    runner: CliRunner, script: Path, source: bytes, where: str, excerpt: str
) -> None:
    script.write_bytes(source)
    for args in (("train.py",), ("-m", "train")):
        result = runner.invoke(app, ["--controller", NOBODY, "submit", *args])
        assert (result.exit_code, result.stdout) == (2, "")
        said, _, rest = result.stderr.partition("\n")
        assert said.startswith(f"error: script train.py, {where}"), said
        assert said.endswith("here. Mend it and submit again")
        assert rest.startswith(excerpt)


def test_a_warning_of_the_compiler_is_no_error(runner: CliRunner, controller: ScriptedController, script: Path) -> None:
    script.write_text("print('\\d')\n")
    assert submit(runner, controller, "train.py").exit_code == 0


def test_the_job_id_is_all_of_stdout(runner: CliRunner, controller: ScriptedController, script: Path) -> None:
    result = submit(runner, controller, "train.py")
    assert (result.exit_code, result.stdout) == (0, "train-0000\n")
    assert "atoll status train-0000" in result.stderr
    assert submit(runner, controller, "train.py", "--json").stdout == '{"job": "train-0001"}\n'


def test_flags_and_arguments_become_the_spec(
    runner: CliRunner, controller: ScriptedController, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text('name = "filed"\nworkers = 1\n[env]\nA = "1"\nB = "1"\n[checkpoint]\nkeep = 9\n')
    args = (
        *("train.py", "--config", "job.toml", "--workers", "2:8", "--env", "B=2", "--env", "C=a=b", "--seed", "7"),
        *("--checkpoint-every", "50", "--checkpoint-dir", "/mnt", "--max-restarts", "1", "--split", "even"),
        *("--", "--lr", "0.1", "--config", "x"),
    )
    assert submit(runner, controller, *args).exit_code == 0
    spec = controller.script.headers[0].spec
    assert (spec.name, spec.script, list(spec.args)) == ("filed", "train.py", ["--lr", "0.1", "--config", "x"])
    assert (spec.min_workers, spec.max_workers, spec.seed, spec.max_restarts, spec.split) == (2, 8, 7, 1, "even")
    assert dict(spec.env) == {"A": "1", "B": "2", "C": "a=b"}
    assert spec.checkpoint == common.CheckpointPolicy(directory="/mnt", every_steps=50, keep=9, memory_replicas=2)


def test_a_module_brings_what_lies_in_the_working_folder(
    runner: CliRunner, controller: ScriptedController, tmp_path: Path
) -> None:
    """1. The file that it is in, and all arguments. 2. `__main__.py` of a package. 3. A job file's, relative to that; a
    flag stands in its place. 4. A script and a module at once are refused."""
    (tmp_path / "package/tool").mkdir(parents=True)
    for name in ("package/train.py", "package/tool/__main__.py", "beside.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "needs.txt").write_text("# none\n\neinops>=0.8  # why\n-r \\\n more.txt\n")
    assert submit(runner, controller, "-m", "package.train", "--", "--lr", "0.1").exit_code == 0
    assert submit(runner, controller, "-m", "package.tool", "--requirements", "needs.txt").exit_code == 0
    (tmp_path / "job.toml").write_text('module = "package.train"\nrequirements = "needs.txt"\nsetup = "make"\n')
    assert submit(runner, controller, "--config", "job.toml", "--", "--lr", "0.1").exit_code == 0
    assert submit(runner, controller, "beside.py", "--config", "job.toml").exit_code == 0
    first, second, third, fourth = (header.spec for header in controller.script.headers)
    assert (first.name, first.module, first.script) == ("train", "package.train", "package/train.py")
    assert list(first.args) == list(third.args) == ["--lr", "0.1"]
    assert (second.module, second.script) == ("package.tool", "package/tool/__main__.py")
    assert list(second.requirements) == list(third.requirements) == ["einops>=0.8", "-r   more.txt"]
    assert (third.module, third.setup) == ("package.train", "make")
    assert (fourth.module, fourth.script) == ("", "beside.py")
    (tmp_path / "job.toml").write_text('module = "package.train"\nscript = "beside.py"\n')
    refused = submit(runner, controller, "--config", "job.toml")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "a job has one of them" in refused.stderr


def test_paths_in_a_job_file_are_relative_to_it(
    runner: CliRunner, controller: ScriptedController, tmp_path: Path
) -> None:
    (tmp_path / "project/src").mkdir(parents=True)
    (tmp_path / "project/src/go.py").write_text("")
    (tmp_path / "project/data.txt").write_text("")
    (tmp_path / "project/job.toml").write_text('script = "src/go.py"\nworkdir = "."\n')
    assert submit(runner, controller, "--config", "project/job.toml").exit_code == 0
    assert controller.script.headers[0].spec.script == "src/go.py"


def while_following(
    controller: ScriptedController, happens: Callable[[], None], follow: Callable[[], Result]
) -> Result:
    """Let things happen once the follower listens to everything."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(follow)
        controller.wait_for(lambda script: {"Watch", "Events", "Logs"} <= set(script.calls))
        happens()
        return result.result(60)


def test_following_shows_progress_and_ends_with_the_job(
    runner: CliRunner, controller: ScriptedController, script: Path
) -> None:
    def happens() -> None:
        controller.script.write(b"epoch 0\rloss 0.5\n")
        controller.script.happened("train-0000", "PLAN_ISSUED", "local-1 is slower")
        controller.script.change(
            "train-0000",
            phase=pb.PHASE_DONE,
            reason="every rank finished",
            progress=pb.Progress(step=20, metrics={"loss": 0.25}),
        )

    result = while_following(controller, happens, lambda: submit(runner, controller, "train.py", "--follow"))
    assert (result.exit_code, result.stdout) == (0, "train-0000\n")
    lines = result.stderr.splitlines()
    assert "train-0000 running" in lines
    assert "[0] loss 0.5" in lines
    assert any(line.endswith("plan_issued      local-1 is slower") for line in lines)
    assert "train-0000 done: every rank finished" in lines
    assert lines[-1] == "train-0000 done: step 20  epoch 0  loss 0.25"


def test_a_failed_job_ends_with_its_culprit_and_the_last_lines_of_it(
    runner: CliRunner, controller: ScriptedController, script: Path
) -> None:
    """Rank 1 raises, so rank 0 loses its peer: rank 1 is named and quoted."""

    def status(rank: int, code: int, kind: common.ExitKind, reason: str) -> pb.WorkerView:
        ended = common.WorkerStatus(state=common.WORKER_STATE_EXITED, exit_code=code, exit_kind=kind, reason=reason)
        return pb.WorkerView(rank=rank, node=f"local-{rank}", status=ended)

    def happens() -> None:
        controller.script.write(b"fine here\n", rank=0)
        controller.script.write(b"Traceback\nValueError: bad loss\n", rank=1)
        controller.script.change(
            "train-0000",
            phase=pb.PHASE_FAILED,
            reason="the same failure twice at step 7",
            exit_code=3,
            workers=[
                status(0, 75, common.EXIT_KIND_PEER_LOST, "peer lost"),
                status(1, 3, common.EXIT_KIND_FAILED, "ValueError: bad loss"),
            ],
        )

    result = while_following(controller, happens, lambda: submit(runner, controller, "train.py", "-f"))
    assert (result.exit_code, result.stdout) == (1, "train-0000\n")
    assert result.stderr.splitlines()[-3:] == [
        "  | Traceback",
        "  | ValueError: bad loss",
        "error: train-0000 failed: rank 1 on local-1 ended with exit code 3 (ValueError: bad loss), "
        "the same failure twice at step 7. Its output: atoll logs train-0000",
    ]


def test_a_cancelled_job_is_no_success(runner: CliRunner, controller: ScriptedController, script: Path) -> None:
    def happens() -> None:
        controller.script.change("train-0000", phase=pb.PHASE_CANCELLED, reason="cancelled by its user")

    result = while_following(controller, happens, lambda: submit(runner, controller, "train.py", "-f"))
    assert result.exit_code == 6
    assert "train-0000 was cancelled: cancelled by its user" in result.stderr


def test_following_goes_on_over_a_controller_restart(
    runner: CliRunner, controller: ScriptedController, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_LAST_WORDS_S", 30.0)  # its streams come back one by one

    def happens() -> None:
        controller.script.write(b"before\n")
        controller.wait_for(lambda script: script.output)
        controller.kill()
        controller.script.write(b"after\n")
        controller.start()
        controller.script.change("train-0000", phase=pb.PHASE_DONE)

    result = while_following(controller, happens, lambda: submit(runner, controller, "train.py", "-f"))
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if line.startswith("[0]")] == ["[0] before", "[0] after"]


def test_following_stops_after_the_time_given(runner: CliRunner, controller: ScriptedController, script: Path) -> None:
    result = submit(runner, controller, "train.py", "--follow", "--follow-for", "0.3")
    assert result.exit_code == 124
    assert result.stderr.splitlines()[-1] == (
        "error: train-0000 did not end within 0.3 s. It goes on: atoll status train-0000"
    )


def test_following_as_json_is_lines_with_a_type(
    runner: CliRunner, controller: ScriptedController, script: Path
) -> None:
    def happens() -> None:
        controller.script.write(b"hello\n")
        controller.script.happened("train-0000", "WORKER_ENDED", "started")
        controller.script.change("train-0000", phase=pb.PHASE_DONE)

    result = while_following(controller, happens, lambda: submit(runner, controller, "train.py", "-f", "--json"))
    first, *rest = [json.loads(line) for line in result.stdout.splitlines()]
    assert first == {"job": "train-0000"}
    assert {"type": "log", "run": 1, "rank": 0, "text": "hello"} in rest
    assert [entry["phase"] for entry in rest if entry["type"] == "job"] == ["running", "done"]
    assert [entry["text"] for entry in rest if entry["type"] == "event"] == ["started"]


def test_ctrl_c_detaches_and_the_job_lives(controller: ScriptedController, script: Path) -> None:
    """Also where a shell without job control started the command with an `&`, and so with SIGINT ignored."""
    command = [
        *("sh", "-c", "trap '' INT; exec \"$@\"", "sh"),
        *(sys.executable, "-m", "atoll.cli.main", "--controller", controller.address),
        "submit",
        str(script),
        "-f",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        controller.wait_for(lambda script: "Watch" in script.calls)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == "train-0000\n"
    told = "detached: train-0000 goes on. See it: atoll status train-0000   end it: atoll cancel train-0000"
    assert err.splitlines()[-1] == told
    assert "Cancel" not in controller.script.calls


def test_ctrl_c_before_the_answer_is_exit_130(controller: ScriptedController, script: Path) -> None:
    controller.script.silent = True
    command = [sys.executable, "-m", "atoll.cli.main", "--controller", controller.address, "submit", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        controller.wait_for(lambda script: "Submit" in script.calls)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_the_first_of_several_failures_is_the_one_whose_code_the_job_has() -> None:
    def worker(rank: int, kind: common.ExitKind, code: int) -> pb.WorkerView:
        return pb.WorkerView(rank=rank, status=common.WorkerStatus(exit_kind=kind, exit_code=code))

    job = pb.Job(
        exit_code=137,
        workers=[
            worker(0, common.EXIT_KIND_FAILED, 1),
            worker(1, common.EXIT_KIND_FAILED, 137),
            worker(2, common.EXIT_KIND_PEER_LOST, 75),
        ],
    )
    found = culprit(job)
    assert found is not None
    assert found.rank == 1
    assert culprit(pb.Job(workers=[worker(0, common.EXIT_KIND_PEER_LOST, 75)])) is None


def test_secrets_are_named_in_the_job_file_and_come_from_the_environment(
    runner: CliRunner, controller: ScriptedController, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text('secrets = ["TOKEN"]\n')
    named = ("train.py", "--config", "job.toml", "--secret", "KEY")
    monkeypatch.setenv("TOKEN", "hunter2")
    refused = submit(runner, controller, *named)
    assert (refused.exit_code, controller.script.headers) == (2, [])
    assert "error: secret KEY is not set here. export KEY=… before you submit" in refused.stderr
    monkeypatch.setenv("KEY", "hunter3")
    accepted = submit(runner, controller, *named, "--json")
    assert dict(controller.script.headers[0].spec.secrets) == {"TOKEN": "hunter2", "KEY": "hunter3"}
    assert "hunter" not in accepted.output


def test_the_environment_of_the_user_is_not_sent(
    runner: CliRunner, controller: ScriptedController, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SECRET", "x")
    submit(runner, controller, "train.py")
    assert dict(controller.script.headers[0].spec.env) == {}
