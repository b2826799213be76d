"""A job as the controller tells it, the document that `--json` makes of it, and the command that shows it."""

from __future__ import annotations

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
    "trained": False,
    "view": None,
    "volunteer_port": 0,
    "overflow_batch": 0,
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
    "load_s": 0.0,
    "forward_s": 0.0,
    "backward_s": 0.0,
    "first_bucket_s": 0.0,
    "update_s": 0.0,
    "sync_s": 0.0,
    "last_sync_s": 0.0,
    "halves": False,
    "consumed": 0,
    "non_finite": 0,
    "sampled_batches": 0,
    "peak_bytes": 0,
    "memory_bytes": 0,
    "max_batch": 0,
    "passes": 0,
    "strategy_metrics": {},
}
LINK = {
    "peer": 1,
    "sent_bytes": 9_000_000,
    "received_bytes": 8_000_000,
    "busy_s": 0.75,
    "goodput_bps": 96e6,
    "dropped": {"old run": 2},
    "volunteer": "",
    "wait_share": 0.0,
    "form": "",
    "differs": 0.0,
    "copied_bytes": 0,
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
        "checkpoint": {"directory": "", "every_steps": 200, "keep": 2, "memory_replicas": 2, "site_safe": False}
        | {"keep_every_steps": 0, "start_from": None},
        "max_restarts": 3,
        "split": "inverse-time",
        "seed": 18446744073709551615,
        "stall_timeout_s": 0.0,
        "hang_s": 0.0,
        "stop_grace_s": 0.0,
        "secrets": {},
        "strategy": "dense",
        "adapt": None,
        "standby": 0,
        "strategy_settings": {},
        "module": "",
        "requirements": [],
        "setup": "",
    },
    "phase": "running",
    "reason": "every rank reported step 0",
    "run": 2,
    "restarts": 1,
    "submitted_unix_s": 1.7e9,
    "submitted_by": "client:alice",
    "cancelled_by": "",
    "view": 0,
    "membership": "",
    "strategy": "",
    "strategy_settings": {},
    "strategy_reason": "",
    "ended_unix_s": 0.0,
    "workers": [
        {"rank": 0, "node": "local-0", "device": 0, "status": STATUS, "share": 0.625, "last": LAST, "links": [LINK]}
        | {"dropped_steps": 0, "island": "", "behind_nat": False},
        {"rank": 1, "node": "local-1", "device": 1, "status": None, "share": 0.375, "last": None, "links": []}
        | {"dropped_steps": 0, "island": "", "behind_nat": False},
    ],
    "progress": {
        "step": 1240,
        "epoch": 3,
        "samples_per_s": 1830.4,
        "step_s": 0.14,
        "metrics": {"accuracy": None, "loss": 0.125},
        "strategy_metrics": {},
        "left_s": 0.0,
        "trained_share": 0.0,
    },
    "plan": {
        "id": 3,
        "run": 2,
        "from_step": 900,
        "shares": [160.0, 96.0],
        "planner": "inverse-time",
        "reason": "local-1 is slower",
        "strategy_params": {},
        "total_batch": 0,
        "learning_rate_factor": 0.0,
        "predicted_step_s": 0.0,
        "view": 0,
        "passes": 0,
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
        submitted_by="client:alice",
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


def sparse_job(step: int = 1240, links: int = 2) -> pb.Job:
    job = full_job()
    job.spec.strategy, job.spec.strategy_settings = "stale-sparse", '{"sparsity":0.99}'
    job.plan.strategy_params = '{"sparsity":0.995}'
    job.progress.MergeFrom(pb.Progress(strategy_metrics={"sparsity": 0.99, "stall_share": 0.031, "fresh_share": 0.71}))
    job.progress.step = step
    del job.workers[0].links[:]
    job.workers[0].links.extend(common.LinkSample(peer=peer, goodput_bps=94.1e6) for peer in range(1, links))
    job.workers[1].links.append(common.LinkSample(peer=0, goodput_bps=1.25e9))
    return job


def atoll(runner: CliRunner, controller: ScriptedController, *args: str) -> tuple[int, str, str]:
    result = runner.invoke(app, ["--controller", controller.address, *args])
    return result.exit_code, result.stdout, result.stderr
