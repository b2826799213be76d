from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.agent.supervisor.processes import on_numa_node
from atoll.agent.telemetry.devices import Device, numa_node_of
from atoll.agent.telemetry.numa import NumaBinding, bindings, read_nodes

TWO_SOCKETS = {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}


def gpus(*nodes: int | None) -> list[Device]:
    return [Device(index, "cuda", "x", 1, 1.0, str(index), numa_node=node) for index, node in enumerate(nodes)]


def test_workers_keep_to_the_node_of_their_device_and_part_its_processors() -> None:
    """1. Workers of all GPUs ran on all processors: their threads and pinned memory were as often as not on the other
    socket than their GPU. 2. Each runs on its GPU's node, and its threads are what is left there for it."""
    bound = bindings(TWO_SOCKETS, gpus(0, 1, 1, 1))
    assert bound[0] == NumaBinding(0, (0, 1, 2, 3, 8, 9, 10, 11), 8)
    assert bound[1] == bound[2] == bound[3] == NumaBinding(1, (4, 5, 6, 7, 12, 13, 14, 15), 2)
    assert bindings(TWO_SOCKETS, gpus(*[0] * 9, 1))[0].threads == 1  # never none


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [
        ({0: {0, 1}}, gpus(0, 0)),
        ({}, gpus(0, 0)),
        (TWO_SOCKETS, gpus(1)),
        (TWO_SOCKETS, gpus(None, None)),
        ({0: {0, 1}, 1: set()}, gpus(0, 1)),  # memory alone, or none of its processors is the agent's
    ],
)
def test_where_there_is_nothing_to_choose_nobody_is_bound(nodes: dict[int, set[int]], devices: list[Device]) -> None:
    assert bindings(nodes, devices) == {}


def test_a_device_whose_node_is_unknown_or_not_ours_stays_free() -> None:
    assert set(bindings(TWO_SOCKETS | {2: set()}, gpus(0, None, 2, 1))) == {0, 3}


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for node, cpus in enumerate(((allowed[0], 100_000, 100_003), (allowed[-1],), ())):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").touch()
        for cpu in cpus:
            (tmp_path / f"node{node}" / f"cpu{cpu}").mkdir()
    assert read_nodes(tmp_path) == {0: {allowed[0]}, 1: {allowed[-1]}, 2: set()}
    assert read_nodes(tmp_path / "none") == {}
    assert set().union(*read_nodes().values()) <= set(allowed)

    for place, node in (("0000:3b:00.0", "1"), ("0001:3b:00.0", "-1")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "numa_node").write_text(f"{node}\n")
    assert numa_node_of("00000000:3B:00.0", tmp_path) == 1
    assert numa_node_of("00000001:3B:00.0", tmp_path) is None
    assert numa_node_of("00000000:00:00.0", tmp_path) is None
    assert numa_node_of("odd", tmp_path) is None


def test_a_command_is_bound_from_its_first_page_on() -> None:
    """The memory policy is compared where this kernel lets it be set: containers often forbid that."""
    last = max(os.sched_getaffinity(0))
    shows = "import os; print(sorted(os.sched_getaffinity(0)), open('/proc/self/numa_maps').read().split()[1])"

    def output(cpus: list[int]) -> tuple[str, str]:
        command = on_numa_node.command([sys.executable, "-c", shows], 0, cpus)
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip(), done.stderr.strip()

    assert output([last])[0] in {f"[{last}] prefer:0", f"[{last}] default"}
    told, why = output([100_000])  # gone meanwhile: it runs all the same
    assert told == f"{sorted(os.sched_getaffinity(0))} default"
    assert why.startswith("atoll: not bound to NUMA node 0: ")
