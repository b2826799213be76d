"""nodes, logs, events, cancel, adjust: the shapes that `--json` promises, and what people read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_controller import ScriptedController
from shown_job import atoll, sparse_job
from typer.testing import CliRunner

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


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
    found = node(connected=True, workers=[running], samples=samples, island_reason="named by the operator")
    controller.script.nodes = pb.ListNodesReply(nodes=[found, lost])
    lines = atoll(runner, controller, "nodes")[1].splitlines()
    assert lines == [
        "NODE     ISLAND   STATE      ADDRESS   DEVICES                 LOAD               MEMORY  WORKERS     VERSION",
        "gpu-1    lab      connected  10.0.0.2  2 x cuda: RTX 3090      50 % 17 GiB 61 °C  64 GiB  vit-3f9a/1  0.1.0",
        "local-1  default  lost                 cpu: Xeon at 0.3 speed  -                       -  -           -",
        "island lab: named by the operator",
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
        "devices": [
            {
                "index": 0,
                "kind": "cpu",
                "model": "Xeon",
                "memory_bytes": 0,
                "speed": 0.3,
                "work_per_s": 0.0,
                "uuid": "",
                "sharers": 0,
            }
        ],
        "samples": [],
        "connected": False,
        "seen_s_ago": 12.0,
        "workers": [],
        "version": "",
        "volunteer": False,
        "behind_nat": False,
        "island_reason": "",
        "links": [],
    }


def test_events(runner: CliRunner, controller: ScriptedController) -> None:
    controller.script.add("vit-1", pb.PHASE_DONE)
    controller.script.happened("vit-1", "WORKER_ENDED", "rank 1 was killed by signal 9", common.LEVEL_WARNING)
    _, out, _ = atoll(runner, controller, "events", "vit-1")
    assert out.split(maxsplit=1)[1] == "warning worker_ended     rank 1 was killed by signal 9\n"
    controller.script.events[-1].rank = 0
    controller.script.events[-1].parts.add(name="ending", seconds=0.5)
    (event,) = json.loads(atoll(runner, controller, "events", "vit-1", "--json")[1])["events"]
    known = {"sequence": 1, "unix_s": 1.7e9, "level": "warning", "job": "vit-1", "run": 0, "kind": "worker_ended"}
    known |= {"text": "rank 1 was killed by signal 9", "rank": 0, "step": None, "lost": []}
    known |= {"parts": [{"name": "ending", "seconds": 0.5}]}
    assert {name: event[name] for name in known} == known
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
    code, out, err = atoll(runner, controller, "adjust", "vit-3f9a", "--sparsity", "0.9975")
    assert (code, out) == (0, "vit-3f9a pinned: sparsity 0.9975, plan 4 from step 900\n")
    assert "atoll status vit-3f9a" in err
    adjusted = json.loads(atoll(runner, controller, "adjust", "vit-3f9a", "--sparsity", "0", "--json")[1])
    assert adjusted["plan"]["strategy_params"] == {"sparsity": 0}
    code, out, err = atoll(runner, controller, "adjust", "vit-3f9a", "--sparsity", "0.5", "--unpin", "sparsity")
    assert (code, out) == (0, "vit-3f9a pinned: sparsity 0.5, plan 6 from step 900\n")
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
