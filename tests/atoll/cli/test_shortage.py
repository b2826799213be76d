"""The line that says for how many devices a job waits."""

from __future__ import annotations

import pytest

from atoll.cli.render.shortage import missing_devices, usable_devices
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def node(name: str, *kinds: str, connected: bool = True, volunteer: bool = False, runs: str = "") -> pb.Node:
    devices = [common.Device(index=index, kind=kind) for index, kind in enumerate(kinds)]
    state = common.WORKER_STATE_RUNNING
    workers = [common.WorkerStatus(id=common.WorkerId(job=job, run=1), state=state) for job in runs.split()]
    return pb.Node(name=name, devices=devices, connected=connected, volunteer=volunteer, workers=workers)


def job(workers: int) -> pb.Job:
    return pb.Job(id="vit-3f9a", spec=common.JobSpec(min_workers=workers, max_workers=max(8, workers)))


LOCAL = [node("local-0", "cpu"), node("local-1", "cpu"), node("local-2", "cpu")]
MORE_AGENTS = "For more agents on this machine: `atoll down`, then `atoll up --agents 4 --detach`. "


@pytest.mark.parametrize(
    ("workers", "nodes", "said"),
    [
        (3, LOCAL, ""),
        (
            4,
            LOCAL,
            f"vit-3f9a waits for a 4th device: 3 are connected. {MORE_AGENTS}"
            "Or `atoll cancel vit-3f9a`, and ask for --workers 3",
        ),
        (
            3,
            [node("a", "cuda"), node("b", "cuda", connected=False), node("c", "cuda", volunteer=True)],
            "vit-3f9a waits for 2 more devices: 1 is connected. Start `atoll agent` on another machine. "
            "Or `atoll cancel vit-3f9a`, and ask for --workers 1",
        ),
        (
            1,
            [node("local-0", "cpu", connected=False)],
            "vit-3f9a waits for a device: none is connected. Start `atoll agent` on each machine that has some",
        ),
        (
            3,
            [node("a", "cuda", "cuda"), node("b", "cpu", "cpu")],
            "vit-3f9a waits for a 3rd device: 2 cuda and 2 cpu devices are connected, and workers of a job are of one "
            "kind. Start `atoll agent` on another machine. Or `atoll cancel vit-3f9a`, and ask for --workers 2",
        ),
        (1, [node("a", "cpu", "cpu", runs="gpt-77aa")], ""),
        (1, [node("a", "cpu", runs="vit-3f9a")], ""),
        (
            1,
            [node("a", "cpu", runs="gpt-77aa")],
            "vit-3f9a waits for the only device, on which gpt-77aa trains. `atoll cancel gpt-77aa` ends it",
        ),
        (
            2,
            [node("a", "cpu", runs="gpt-77aa"), node("b", "cpu", runs="cnn-12ab"), node("c", "cpu")],
            "vit-3f9a waits for 2 free devices: 1 of 3 is free, the others train cnn-12ab, gpt-77aa. "
            "`atoll cancel cnn-12ab` ends one",
        ),
    ],
)
def test_a_job_that_lacks_devices_says_what_to_do(workers: int, nodes: list[pb.Node], said: str) -> None:
    assert missing_devices(job(workers), nodes) == said


def test_gpus_are_used_if_they_suffice_else_the_kind_of_which_there_is_more() -> None:
    nodes = [node("a", "cuda"), node("b", "cpu", "cpu"), node("c", "cpu", volunteer=True)]
    assert (usable_devices(nodes), usable_devices(nodes, 2), usable_devices([])) == (1, 2, 0)
