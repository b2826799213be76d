"""Batches that worker processes load: the same as without them, and nothing of them is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from loader_rig import make
from torch.utils.data import TensorDataset
from zmq_agent import Start

from atoll.agent.runtime.data.by_value import ByValue
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.plans.planned_step import PlannedStep
from atoll.agent.runtime.plans.schedule import PlanSchedule
from atoll.errors import BadInput


@pytest.fixture(scope="module")
def worker_server() -> Iterator[None]:
    """The server that worker processes are forked from lives as long as its parent; here while these tests run."""
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("worker_server")
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_give_the_same_batches_and_end_with_the_iteration(persistent: bool) -> None:
    """1. Two workers cut 4 steps ahead. 2. A plan agreed in step 1, with another total batch, holds from step 6 on: 1 +
    1 + 4. 3. A break ends both."""

    def loader(num_workers: int) -> tuple[Loader[Any], PlanSchedule]:
        schedule = PlanSchedule(2, PlannedStep((1, 1)))
        made = make(
            dataset=TensorDataset(torch.arange(64)),
            batch_size=4,
            seed=5,
            schedule=schedule,
            num_workers=num_workers,
            persistent_workers=persistent and num_workers > 0,
        )
        schedule.add(2, 0, PlannedStep((3, 1), total_batch=8))
        return made, schedule

    ahead, schedule = loader(2)
    sizes, rows = [], []
    ahead.begin_epoch(0)
    for (batch,) in ahead:
        sizes.append(len(batch))
        rows.append(batch.tolist())
        if ahead.position.step == 1:
            schedule.agree(1, 2, ahead.lead)
        if ahead.position.step == 9:
            break
    assert (ahead.lead, sizes) == (4, [2] * 6 + [6] * 4)
    assert bool(_children_of_the_server(0.5 if persistent else 30)) == persistent
    ahead.begin_epoch(1)
    rows += [batch.tolist() for (batch,) in ahead]
    ahead.close()
    assert _children_of_the_server(30) == []

    plain, schedule = loader(0)
    expected = []
    for epoch in (0, 1):
        plain.begin_epoch(epoch)
        for (batch,) in plain:
            expected.append(batch.tolist())
            if plain.position.step == 5:
                schedule.agree(5, 2, plain.lead)
            if plain.position.step == 9:
                break
    assert rows == expected


def test_a_script_without_main_guard_trains_with_workers_on_what_it_defines(tmp_path: Path, start: Start) -> None:
    """1. The worker processes do not import it. 2. They have its dataset and its lambda by value, the tensors in shared
    memory. 3. Batches, samples of a stream and exceptions of its own classes come back as these classes: torch once
    waited for ever for what a worker could not pickle. 4. What cannot be sent is named, and a wait has an end."""
    script = Path(__file__).parent.parent / "scripts" / "unguarded.py"
    with (tmp_path / "log").open("wb") as log:
        worker = start([sys.executable, str(script)], os.environ, log)
    code, said = worker.wait(110), (tmp_path / "log").read_text()
    assert code == 0, said
    seen = json.loads(said.splitlines()[-1])
    assert seen == {"rows": [2.0 * row for row in range(40)], "workers": [0, 1], "shared": [True]}
    with pytest.raises(BadInput, match="lock cannot be handed to a loader.s worker"):
        ByValue(threading.Lock()).__reduce__()


def test_no_worker_process_outlives_a_training_process_that_is_killed(tmp_path: Path, start: Start) -> None:
    """By SIGKILL, in mid-epoch and without an agent, which would end the process group. Their server ends as well."""
    script = Path(__file__).parent.parent / "scripts" / "killed_in_epoch.py"
    with (tmp_path / "log").open("wb") as log:
        worker = start([sys.executable, str(script)], os.environ, log)
    code, said = worker.wait(110), (tmp_path / "log").read_text()
    assert code == -signal.SIGKILL, said
    # The resource tracker may warn behind this line: it removes semaphores that the killed process leaves.
    line = next(line for line in said.splitlines() if line.startswith("started:"))
    started = {int(pid) for pid in line.split()[1:]}
    assert len(started) >= 4, "two workers, their server, and a tracker of what they share"
    left = [one for one in psutil.process_iter() if one.pid in started and one.status() != psutil.STATUS_ZOMBIE]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert alive == []


def _children_of_the_server(within_s: float) -> list[psutil.Process]:
    """Those that are still there then."""
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    _, alive = psutil.wait_procs(server.children(), timeout=within_s)
    return alive
