"""status and jobs: the shapes that `--json` promises, and what people read."""

from __future__ import annotations

import json
import re

import pytest
from scripted_controller import ScriptedController
from shown_job import JOB, atoll, full_job, sparse_job
from typer.testing import CliRunner

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def test_status_as_json_is_this_document(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.jobs["vit-3f9a"] = full_job()
    code, out, err = atoll(runner, controller, "status", "vit-3f9a", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == JOB


def test_jobs_as_json_is_one_document(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.jobs["vit-3f9a"] = full_job()
    controller.script.add("old-1", pb.PHASE_DONE)
    assert json.loads(atoll(runner, controller, "jobs", "--json")[1]) == {"jobs": [JOB]}
    listed = json.loads(atoll(runner, controller, "jobs", "--all", "--json")[1])["jobs"]
    assert [job["phase"] for job in listed] == ["running", "done"]


def test_status_reads_like_this(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.jobs["vit-3f9a"] = full_job()
    _, out, _ = atoll(runner, controller, "status", "vit-3f9a")
    lines = out.splitlines()
    assert lines[0] == "vit-3f9a: running, every rank reported step 0"
    assert lines[1].startswith("train.py --lr 0.1, 2:8 workers, submitted ")
    assert lines[1].endswith(" ago (client:alice), run 2, restarts 1")
    assert lines[2:] == [
        "step 1240  epoch 3  loss 0.125  accuracy nan  1830 samples/s  140 ms a step",
        "checkpoint: newest at step 1200; memory: step 1239",
        "plan 3 (inverse-time) from step 900: local-1 is slower",
        "strategy dense",
        "links 0-1 96.0 Mbit/s",
        "",
        "RANK  NODE     DEVICE  STATE    BATCH   SHARE  STEP    TIME  COMPUTE     WAIT",
        "   0  local-0       0  running    160  62.5 %  1240  140 ms   120 ms  18.0 ms",
        "   1  local-1       1  unknown      -  37.5 %     -       -        -        -",
    ]


def test_status_tells_of_a_recovery_under_way_and_of_one_that_is_over(
    runner: CliRunner, controller: ScriptedController
) -> None:
    job = controller.script.jobs["vit-3f9a"] = full_job()
    job.recovery.MergeFrom(pb.Recovery(run=1, cause="rank 1 on b was killed", seen_unix_s=1e9, detected_unix_s=1e9 + 1))
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert re.fullmatch(r"recovering for \d+\.\d s: rank 1 on b was killed", lines[4])
    job.recovery.MergeFrom(
        pb.Recovery(resumed_unix_s=1e9 + 3.9, tier="memory", step=812, reached_step=813, steps_lost=1)
    )
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert lines[4] == "recovered in 3.9 s from the loss of run 1: memory, step 812, 1 step lost"


@pytest.mark.parametrize(
    ("job", "strategy", "links"),
    [
        (
            sparse_job(),
            "strategy stale-sparse: sparsity 99.00 % (99.50 % soon)  stall 3.1 % of the step  fresh layers 71 %",
            "links 0-1 94.1 Mbit/s  1-0 1.25 Gbit/s",
        ),
        (sparse_job(step=0), "strategy stale-sparse: sparsity 99.50 %", "links 0-1 94.1 Mbit/s  1-0 1.25 Gbit/s"),
        (
            sparse_job(links=40),
            "strategy stale-sparse: sparsity 99.00 % (99.50 % soon)  stall 3.1 % of the step  fresh layers 71 %",
            "links " + "".join(f"0-{peer} 94.1 Mbit/s  " for peer in range(1, 13)) + "and 28 more",
        ),
    ],
)
def test_status_of_a_job_over_thin_links(
    runner: CliRunner, controller: ScriptedController, job: pb.Job, strategy: str, links: str
) -> None:
    controller.script.jobs["vit-3f9a"] = job
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert lines[lines.index("") - 2 : lines.index("")] == [strategy, links]
    document = json.loads(atoll(runner, controller, "status", "vit-3f9a", "--json")[1])
    assert document["plan"]["strategy_params"] == {"sparsity": 0.995}
    assert document["progress"]["strategy_metrics"]["stall_share"] == 0.031


def test_a_link_that_was_never_busy_is_idle(runner: CliRunner, controller: ScriptedController) -> None:
    job = sparse_job()
    job.workers[1].links[0].goodput_bps = 0
    controller.script.jobs["vit-3f9a"] = job
    assert "links 0-1 94.1 Mbit/s  1-0 idle" in atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()


def test_status_says_what_links_to_volunteers_carry_and_cost(runner: CliRunner, controller: ScriptedController) -> None:
    job = full_job()
    for peer, (name, form, share, differs) in enumerate(
        [
            ("a\x1b/0", "float32", 0.02, 1e-7),
            ("b/0", "int8", 0.25, 0.006),
            ("c/1", "waits", 0.9, 0),
            ("gone/0", "", 1, 0),
        ]
    ):
        link = common.LinkSample(
            peer=4096 + peer, volunteer=name, form=form, wait_share=share, differs=differs, sent_bytes=12_340_000
        )
        job.workers[0].links.append(link)
    controller.script.jobs["vit-3f9a"] = job
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    carries = "12.3 MB to it, 0 Bytes from it"
    assert [line for line in lines if line.startswith("volunteer ")] == [
        f"volunteer c/1 of rank 0: waits, {carries}, 90 % of its time waits for its link",
        f"volunteer b/0 of rank 0: int8, {carries}, 25 % of its time waits for its link, answers differ by 0.6 %",
        f"volunteer a/0 of rank 0: float32, {carries}, 2 % of its time waits for its link",
    ]
    assert "4096" not in "".join(lines)


def test_status_says_whose_telemetry_was_dropped_and_whose_numbers_are_not_finite(
    runner: CliRunner, controller: ScriptedController
) -> None:
    job = full_job()
    job.workers[0].dropped_steps, job.workers[1].dropped_steps = 3, 12
    job.workers[1].last.non_finite = 2
    controller.script.jobs["vit-3f9a"] = job
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert "dropped telemetry of 3 steps of rank 0, 12 steps of rank 1" in lines
    assert "not finite: a loss, gradient or weight in 2 steps of rank 1" in lines


def test_status_names_the_devices_that_wait_and_counts_very_many(
    runner: CliRunner, controller: ScriptedController
) -> None:
    job = full_job()
    job.standby.extend(pb.Standby(node=f"n{i}", device=i, reason="it would take \x1b[2J 9 % longer") for i in range(10))
    controller.script.jobs["vit-3f9a"] = job
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    shown = [line for line in lines if line.startswith("standby")]
    assert len(shown) == 9
    assert shown[3].startswith("standby n3/3: it would take")
    assert "\x1b" not in shown[3]
    assert shown[8] == "standby: and 2 more"


def test_jobs_reads_like_this(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.jobs["vit-3f9a"] = full_job()
    _, out, _ = atoll(runner, controller, "jobs")
    header, row = out.splitlines()
    assert header.split() == ["JOB", "PHASE", "WORKERS", "STEP", "LOSS", "SAMPLES/S", "AGE", "REASON"]
    assert row.startswith("vit-3f9a  running  1 of 2:8  1240  0.125       1830  ")
    assert row.endswith("every rank reported step 0")


def test_no_jobs_is_said_on_stderr_only(runner: CliRunner, controller: ScriptedController) -> None:
    code, out, err = atoll(runner, controller, "jobs")
    assert (code, out) == (0, "")
    assert "no live jobs" in err
