"""A whole drill, short: real processes, real kills."""

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

DRILL = (sys.executable, "-m", "drill")
TESTS = str(Path(__file__).resolve().parent.parent)


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


@pytest.mark.timeout(600)
def test_a_short_drill_holds_and_leaves_nothing(tmp_path: Path) -> None:
    """1. Gradients overflow on one rank: all leave that update out, and the undisturbed job does at the same step. 2.
    300 agents leave at once: each is kept until its lease ends. 3. A worker dies, and the leading controller while the
    job recovers. 4. An etcd member of three dies. 5. A worker dies. 6. One more, while checkpoints take their time, and
    the peer that saves what is left. The last checkpoint takes longer than 13 s, in which the job once failed."""
    kinds = "workers,overflow,crowd,saving,recovery,etcd"  # each once; the seed orders them
    arguments = ("--minutes=0.82", "--every=7", "--seed=144", "--nodes=3", f"--kinds={kinds}", "--json")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": TESTS}
    done = subprocess.run(
        [*DRILL, *arguments], capture_output=True, text=True, timeout=560, check=False, env=environment
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)
    assert all(verdict["holds"] for verdict in told["invariants"]), told
    assert "a node is kept until its lease ends" in {verdict["name"] for verdict in told["invariants"]}, told
    strikes = {one["strike"]: one for one in told["strikes"]}
    disturbing = {"worker", "leader", "etcd member", "worker, then leader", "worker, then who saves"}
    assert strikes.keys() == disturbing | {"overflow on one rank", "a crowd leaves"}, told
    assert all(strikes[strike]["training_s"] for strike in disturbing), told
    undisturbed = (strikes["overflow on one rank"]["ended_a_run"], strikes["a crowd leaves"]["ended_a_run"])
    assert undisturbed == (False, False), told
    assert 0 < told["effective_ratio"] < 1
    assert list(tmp_path.glob("atoll-drill-*")) == []
    wait_until("nothing of it is left", lambda: not marked(tmp_path), 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_drill_that_is_interrupted_takes_its_cluster_with_it(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": TESTS}
    with subprocess.Popen(
        [*DRILL, "--nodes=2", "--controllers=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as drill:
        wait_until("its machines run", lambda: len(marked(tmp_path)) >= 6, 90)
        drill.send_signal(number)
        drill.communicate(timeout=90)
    assert drill.returncode == (130 if number is signal.SIGINT else -number)
    wait_until("nothing of it is left", lambda: not marked(tmp_path), 30)
