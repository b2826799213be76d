from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.agent.runtime.agent_link.place import AgentEndpoint, WorkerPlace
from atoll.errors import BadInput

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
AGENT = {"ATOLL_AGENT_SOCKET": "ipc:///run/a.sock", "ATOLL_JOB": "j", "ATOLL_RUN": "4", "ATOLL_WORKER_SECRET": "s"}


def test_without_any_variable_it_is_alone() -> None:
    assert WorkerPlace.from_environment({}) == WorkerPlace(0, 1, 0, 1, "127.0.0.1", None)


def test_torchrun_and_agent_environments_are_read() -> None:
    assert WorkerPlace.from_environment(TORCHRUN) == WorkerPlace(1, 3, 0, 3, "10.0.0.1", None)
    endpoint = AgentEndpoint("ipc:///run/a.sock", "j", 4, 1, "s")
    assert WorkerPlace.from_environment(TORCHRUN | AGENT) == WorkerPlace(1, 3, 0, 3, "10.0.0.1", endpoint)
    joins = WorkerPlace.from_environment(TORCHRUN | AGENT | {"ATOLL_RANK": "7"})
    assert joins.agent == AgentEndpoint("ipc:///run/a.sock", "j", 4, 7, "s")
    on_gpu = WorkerPlace.from_environment(TORCHRUN | AGENT | {"ATOLL_DEVICE_KIND": "cuda"})
    assert on_gpu.agent == AgentEndpoint("ipc:///run/a.sock", "j", 4, 1, "s", has_gpu=True)
    shares = TORCHRUN | AGENT | {"ATOLL_DEVICE_KIND": "cuda", "ATOLL_DEVICE_SHARERS": "3"}
    endpoint = AgentEndpoint("ipc:///run/a.sock", "j", 4, 1, "s", has_gpu=True, gpu_sharers=3)
    assert WorkerPlace.from_environment(shares).agent == endpoint


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"RANK": "3"}, "RANK = 3 must be below WORLD_SIZE = 3"),
        ({"RANK": "-1"}, "RANK = '-1'"),
        ({"RANK": "9" * 30}, "RANK"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = ''"),
        (AGENT | {"ATOLL_AGENT_SOCKET": "tcp://1.2.3.4:5"}, "ATOLL_AGENT_SOCKET"),
        (AGENT | {"ATOLL_JOB": "", "ATOLL_WORKER_SECRET": ""}, "ATOLL_JOB, ATOLL_WORKER_SECRET is not"),
        (AGENT | {"ATOLL_RUN": "one"}, "ATOLL_RUN = 'one'"),
    ],
)
def test_wrong_environment_is_named(change: dict[str, str], names: str) -> None:
    with pytest.raises(BadInput, match=names):
        WorkerPlace.from_environment(TORCHRUN | change)


def test_import_atoll_is_light() -> None:
    program = (
        "import sys, atoll\n"
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules, 'import atoll is heavy'\n"
        "assert {'init', 'Run'} <= set(dir(atoll))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=110)
