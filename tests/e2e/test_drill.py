"""The whole command `atoll drill`, short: real processes, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster import wait_until

ATOLL = (sys.executable, "-m", "atoll.cli.main")


def marked(folder: Path) -> list[psutil.Process]:
    """Processes of drills whose folder is in here."""
    found = []
    for process in psutil.process_iter():
        try:
            drill = process.environ().get("ATOLL_DRILL", "")
            if drill.startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_short_drill_holds_and_leaves_nothing(tmp_path: Path) -> None:
    """An etcd member of three; a worker; a worker and the leading controller while the job recovers."""
    arguments = ("--minutes=0.8", "--every=7", "--seed=18", "--nodes=3", "--kinds=recovery,etcd,workers", "--json")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*ATOLL, "drill", *arguments], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)
    assert all(verdict["holds"] for verdict in told["invariants"]), told
    assert {"worker", "leader", "etcd member"} <= {one["strike"] for one in told["strikes"]}
    assert all(one["training_s"] for one in told["strikes"]), told
    assert 0 < told["effective_ratio"] < 1
    assert list(tmp_path.glob("atoll-drill-*")) == []
    wait_until("nothing of it is left", lambda: not marked(tmp_path), 30)


def test_who_saves_may_die_in_the_middle_of_it_and_the_last_checkpoint_may_take_its_time(tmp_path: Path) -> None:
    """1. A worker dies; the peer that saves what is left dies too: nothing is lost but the step. 2. The last checkpoint
    takes longer than 13 s, in which the job once failed."""
    arguments = ("--minutes=0.25", "--every=7", "--seed=5", "--nodes=3", "--workers=3", "--kinds=saving", "--json")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*ATOLL, "drill", *arguments], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)
    assert all(verdict["holds"] for verdict in told["invariants"]), told
    assert {one["strike"] for one in told["strikes"]} == {"worker, then who saves"}  # how many: by how soon it was back


def test_an_overflow_on_one_rank_and_a_crowd_that_leaves_cost_nothing(tmp_path: Path) -> None:
    """1. Gradients overflow on one rank: all leave that update out, and the undisturbed job does at the same step. 2.
    300 agents leave at once: each is kept until its lease ends. 3. A worker is killed meanwhile."""
    arguments = ("--minutes=0.9", "--every=7", "--seed=2", "--nodes=3", "--kinds=overflow,crowd,workers", "--json")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*ATOLL, "drill", *arguments], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)
    assert "a node is kept until its lease ends" in {verdict["name"] for verdict in told["invariants"]}, told
    assert {one["strike"] for one in told["strikes"]} == {"worker", "overflow on one rank", "a crowd leaves"}, told
    undisturbed = {one["strike"]: one["ended_a_run"] for one in told["strikes"]}
    assert (undisturbed["overflow on one rank"], undisturbed["a crowd leaves"]) == (False, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_drill_that_is_interrupted_takes_its_cluster_with_it(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*ATOLL, "drill", "--nodes=2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as drill:
        wait_until("its machines run", lambda: len(marked(tmp_path)) >= 6, 90)
        drill.send_signal(number)
        drill.communicate(timeout=90)
    assert drill.returncode == (130 if number is signal.SIGINT else -number)
    wait_until("nothing of it is left", lambda: not marked(tmp_path), 30)
