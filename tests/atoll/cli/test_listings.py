"""jobs, status, nodes, logs, events, cancel: the shapes that `--json` promises, and what people read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

STATUS = {
    "id": {"job": "vit-3f9a", "run": 2, "rank": 0},
    "state": "running",
    "pid": 4711,
    "exit_code": 0,
    "exit_kind": None,
    "reason": "",
    "uses_atoll": True,
    "step": 1240,
    "plan": 3,
}
LAST = {
    "step": 1240,
    "local_batch": 160,
    "total_batch": 256,
    "step_s": 0.14,
    "compute_s": 0.12,
    "wait_s": 0.018,
    "local_grad_sqnorm": 0.0,
    "global_grad_sqnorm": 0.0,
    "epoch": 3,
    "plan": 3,
    "stall_s": 0.0,
    "fresh_share": 0.0,
    "rate": 0.0,
    "sent_bytes": 0,
    "load_s": 0.0,
    "forward_s": 0.0,
    "backward_s": 0.0,
    "first_bucket_s": 0.0,
    "update_s": 0.0,
    "sync_s": 0.0,
    "last_sync_s": 0.0,
}
LINK = {
    "peer": 1,
    "sent_bytes": 9_000_000,
    "received_bytes": 8_000_000,
    "busy_s": 0.75,
    "goodput_bps": 96e6,
    "dropped": {"old run": 2},
}
JOB = {
    "id": "vit-3f9a",
    "spec": {
        "name": "vit",
        "script": "train.py",
        "args": ["--lr", "0.1"],
        "min_workers": 2,
        "max_workers": 8,
        "env": {"EPOCHS": "3"},
        "code_sha256": "",
        "checkpoint": {"directory": "", "every_steps": 200, "keep": 2, "memory_replicas": 2, "site_safe": False},
        "max_restarts": 3,
        "split": "inverse-time",
        "seed": 18446744073709551615,
        "stall_timeout_s": 0.0,
        "strategy": "dense",
        "stale_sparse": None,
        "adapt": None,
        "standby": 0,
    },
    "phase": "running",
    "reason": "every rank reported step 0",
    "run": 2,
    "restarts": 1,
    "submitted_unix_s": 1.7e9,
    "ended_unix_s": 0.0,
    "workers": [
        {"rank": 0, "node": "local-0", "device": 0, "status": STATUS, "share": 0.625, "last": LAST, "links": [LINK]}
        | {"dropped_steps": 0},
        {"rank": 1, "node": "local-1", "device": 1, "status": None, "share": 0.375, "last": None, "links": []}
        | {"dropped_steps": 0},
    ],
    "progress": {
        "step": 1240,
        "epoch": 3,
        "samples_per_s": 1830.4,
        "step_s": 0.14,
        "metrics": {"accuracy": None, "loss": 0.125},
        "rate": 0.0,
        "stall_share": 0.0,
        "fresh_share": 0.0,
    },
    "plan": {
        "id": 3,
        "run": 2,
        "from_step": 900,
        "shares": [160.0, 96.0],
        "planner": "inverse-time",
        "reason": "local-1 is slower",
        "rate": None,
        "total_batch": 0,
        "learning_rate_factor": 0.0,
        "predicted_step_s": 0.0,
    },
    "checkpoint_step": 1200,
    "memory_step": 1239,
    "exit_code": 0,
    "standby": [],
    "pins": None,
    "recovery": None,
}


def full_job() -> pb.Job:
    id_ = common.WorkerId(job="vit-3f9a", run=2, rank=0)
    status = common.WorkerStatus(
        id=id_, state=common.WORKER_STATE_RUNNING, pid=4711, uses_atoll=True, step=1240, plan=3
    )
    last = common.StepSample(
        step=1240, local_batch=160, total_batch=256, step_s=0.14, compute_s=0.12, wait_s=0.018, epoch=3, plan=3
    )
    link = common.LinkSample(
        peer=1, sent_bytes=9_000_000, received_bytes=8_000_000, busy_s=0.75, goodput_bps=96e6, dropped={"old run": 2}
    )
    return pb.Job(
        id="vit-3f9a",
        spec=common.JobSpec(
            name="vit",
            script="train.py",
            args=["--lr", "0.1"],
            min_workers=2,
            max_workers=8,
            env={"EPOCHS": "3"},
            checkpoint=common.CheckpointPolicy(every_steps=200, keep=2, memory_replicas=2),
            max_restarts=3,
            split="inverse-time",
            seed=2**64 - 1,
            strategy="dense",
        ),
        phase=pb.PHASE_RUNNING,
        reason="every rank reported step 0",
        run=2,
        restarts=1,
        submitted_unix_s=1.7e9,
        workers=[
            pb.WorkerView(rank=0, node="local-0", status=status, share=0.625, last=last, links=[link]),
            pb.WorkerView(rank=1, node="local-1", device=1, share=0.375),
        ],
        progress=pb.Progress(
            step=1240, epoch=3, samples_per_s=1830.4, step_s=0.14, metrics={"loss": 0.125, "accuracy": float("nan")}
        ),
        plan=common.Plan(
            id=3, run=2, from_step=900, shares=[160, 96], planner="inverse-time", reason="local-1 is slower"
        ),
        checkpoint_step=1200,
        memory_step=1239,
    )


def atoll(runner: CliRunner, controller: ScriptedController, *args: str) -> tuple[int, str, str]:
    result = runner.invoke(app, ["--controller", controller.address, *args])
    return result.exit_code, result.stdout, result.stderr


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
    assert lines[1].endswith(" ago, run 2, restarts 1")
    assert lines[2:] == [
        "step 1240  epoch 3  loss 0.125  accuracy nan  1830 samples/s  140 ms a step",
        "checkpoint: newest at step 1200; memory: step 1239",
        "plan 3 (inverse-time) from step 900: local-1 is slower",
        "strategy dense",
        "links 0-1 96 Mbit/s",
        "",
        "RANK  NODE     DEVICE  STATE    BATCH   SHARE  STEP    TIME  COMPUTE   WAIT",
        "   0  local-0       0  running    160  62.5 %  1240  140 ms   120 ms  18 ms",
        "   1  local-1       1  unknown      -  37.5 %     -       -        -      -",
    ]


def test_status_tells_of_a_recovery_under_way_and_of_one_that_is_over(
    runner: CliRunner, controller: ScriptedController
) -> None:
    job = controller.script.jobs["vit-3f9a"] = full_job()
    job.recovery.MergeFrom(pb.Recovery(run=1, cause="rank 1 on b was killed", seen_unix_s=1e9, detected_unix_s=1e9 + 1))
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert re.fullmatch(r"recovering for \d+\.\d s: rank 1 on b was killed", lines[4])
    job.recovery.MergeFrom(pb.Recovery(resumed_unix_s=1e9 + 3.9, tier="memory", step=812, steps_lost=1))
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert lines[4] == "recovered in 3.9 s from the loss of run 1: memory, step 812, 1 step lost"


def sparse_job(step: int = 1240, links: int = 2) -> pb.Job:
    job = full_job()
    job.spec.strategy, job.spec.stale_sparse.rate = "stale-sparse", 0.99
    job.plan.rate = 0.995
    job.progress.MergeFrom(pb.Progress(rate=0.99, stall_share=0.031, fresh_share=0.71))
    job.progress.step = step
    del job.workers[0].links[:]
    job.workers[0].links.extend(common.LinkSample(peer=peer, goodput_bps=94.1e6) for peer in range(1, links))
    job.workers[1].links.append(common.LinkSample(peer=0, goodput_bps=1.25e9))
    return job


@pytest.mark.parametrize(
    ("job", "strategy", "links"),
    [
        (
            sparse_job(),
            "strategy stale-sparse: rate 99.00 % (99.50 % soon)  stall 3.1 % of the step  fresh layers 71 %",
            "links 0-1 94.1 Mbit/s  1-0 1.25 Gbit/s",
        ),
        (sparse_job(step=0), "strategy stale-sparse: rate 99.50 %", "links 0-1 94.1 Mbit/s  1-0 1.25 Gbit/s"),
        (
            sparse_job(links=40),
            "strategy stale-sparse: rate 99.00 % (99.50 % soon)  stall 3.1 % of the step  fresh layers 71 %",
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
    assert (document["plan"]["rate"], document["progress"]["stall_share"]) == (0.995, 0.031)


def test_status_says_whose_telemetry_was_dropped(runner: CliRunner, controller: ScriptedController) -> None:
    job = full_job()
    job.workers[0].dropped_steps, job.workers[1].dropped_steps = 3, 12
    controller.script.jobs["vit-3f9a"] = job
    lines = atoll(runner, controller, "status", "vit-3f9a")[1].splitlines()
    assert "dropped telemetry of 3 steps of rank 0, 12 steps of rank 1" in lines


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
    assert "no living jobs" in err


def node(**fields: Any) -> pb.Node:
    devices = [common.Device(index=n, kind="cuda", model="RTX 3090", memory_bytes=24 * 2**30, speed=1) for n in (0, 1)]
    return pb.Node(
        name="gpu-1",
        island="lab",
        address="10.0.0.2",
        memory_bytes=64 * 2**30,
        devices=devices,
        version="0.1.0",
        **fields,
    )


def test_nodes(runner: CliRunner, controller: ScriptedController) -> None:
    running = common.WorkerStatus(id=common.WorkerId(job="vit-3f9a", run=2, rank=1), state=common.WORKER_STATE_RUNNING)
    slow = common.Device(kind="cpu", model="Xeon", speed=0.3)
    lost = pb.Node(name="local-1", island="default", devices=[slow], seen_s_ago=12)
    samples = [
        common.DeviceSample(index=0, utilisation=0.95, memory_used_bytes=2**34, temperature_c=61),
        common.DeviceSample(index=1, utilisation=0.05, memory_used_bytes=2**30),
    ]
    found = node(connected=True, workers=[running], samples=samples)
    controller.script.nodes = pb.ListNodesReply(nodes=[found, lost])
    lines = atoll(runner, controller, "nodes")[1].splitlines()
    assert lines == [
        "NODE     ISLAND   STATE      ADDRESS   DEVICES                 LOAD               MEMORY  WORKERS     VERSION",
        "gpu-1    lab      connected  10.0.0.2  2 x cuda: RTX 3090      50 % 17 GiB 61 °C  64 GiB  vit-3f9a/1  0.1.0",
        "local-1  default  lost                 cpu: Xeon at 0.3 speed  -                       -  -           -",
    ]
    document = json.loads(atoll(runner, controller, "nodes", "--json")[1])
    assert list(document) == ["nodes"]
    assert document["nodes"][0]["samples"][1] == {
        "index": 1,
        "utilisation": 0.05,
        "memory_used_bytes": 2**30,
        "temperature_c": None,
    }
    assert document["nodes"][1] == {
        "name": "local-1",
        "island": "default",
        "address": "",
        "memory_bytes": 0,
        "devices": [{"index": 0, "kind": "cpu", "model": "Xeon", "memory_bytes": 0, "speed": 0.3, "work_per_s": 0.0}],
        "samples": [],
        "connected": False,
        "seen_s_ago": 12.0,
        "workers": [],
        "version": "",
    }


def test_events(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1", pb.PHASE_DONE)
    controller.script.happened("vit-1", "worker", "rank 1 was killed by signal 9", common.LEVEL_WARNING)
    _, out, _ = atoll(runner, controller, "events", "vit-1")
    assert out.split(maxsplit=1)[1] == "warning worker     rank 1 was killed by signal 9\n"
    event = {
        "sequence": 1,
        "unix_s": 1.7e9,
        "level": "warning",
        "job": "vit-1",
        "run": 0,
        "kind": "worker",
        "text": "rank 1 was killed by signal 9",
    }
    assert json.loads(atoll(runner, controller, "events", "vit-1", "--json")[1]) == {"events": [event]}
    assert json.loads(atoll(runner, controller, "events", "vit-1", "--json", "-f")[1]) == event


def test_logs_say_the_rank_unless_one_was_asked_for(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1", pb.PHASE_DONE)
    controller.script.write(b"a\nb\n", rank=0)
    controller.script.write(b"c\nno end", rank=1)
    assert atoll(runner, controller, "logs", "vit-1")[1] == "[0] a\n[0] b\n[1] c\n[1] no end\n"
    assert atoll(runner, controller, "logs", "vit-1", "--rank", "0")[1] == "a\nb\n"
    assert atoll(runner, controller, "logs", "vit-1", "--rank", "0", "--tail", "1", "-f")[1] == "b\n"
    lines = [{"run": 1, "rank": 0, "text": "b"}]
    out = atoll(runner, controller, "logs", "vit-1", "--rank", "0", "--tail", "1", "--json")[1]
    assert json.loads(out) == {"lines": lines}


def test_garbage_in_a_log_is_no_error(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1", pb.PHASE_DONE)
    controller.script.write(b"\xff\x00\x1b[31m\n" + b"x" * 200_000)
    code, out, _ = atoll(runner, controller, "logs", "vit-1", "--rank", "0")
    assert code == 0
    assert out.count("x") == 200_000
    assert max(map(len, out.splitlines())) <= 64 * 1024


def test_cancel(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1")
    code, out, err = atoll(runner, controller, "cancel", "vit-1")
    assert (code, out) == (0, "vit-1 stopping\n")
    assert "atoll status vit-1" in err
    assert json.loads(atoll(runner, controller, "cancel", "vit-1", "--json")[1])["phase"] == "stopping"


def test_adjust(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.jobs["vit-3f9a"] = sparse_job()
    code, out, err = atoll(runner, controller, "adjust", "vit-3f9a", "--rate", "0.9975")
    assert (code, out) == (0, "vit-3f9a pinned: rate 99.75 %, plan 4 from step 900\n")
    assert "atoll status vit-3f9a" in err
    assert json.loads(atoll(runner, controller, "adjust", "vit-3f9a", "--rate", "0", "--json")[1])["plan"]["rate"] == 0
    code, out, _ = atoll(runner, controller, "adjust", "vit-3f9a", "--total-batch", "512", "--shares", "3:1")
    assert (code, "batch 512, shares 75 % 25 %" in out) == (0, True)
    code, _, err = atoll(runner, controller, "adjust", "vit-3f9a", "--shares", "3;1")
    assert (code, "--shares '3;1' must be numbers" in err) == (2, True)


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "events"])
def test_a_job_that_is_none_is_one_line_and_exit_2(
    runner: CliRunner, controller: ScriptedController, command: str
) -> None:
    code, out, err = atoll(runner, controller, command, "nope")
    assert (code, out) == (2, "")
    assert err == f"error: {'cancel nope' if command == 'cancel' else 'job nope'}: no job 'nope'. See `atoll jobs -a`\n"
