from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.supervisor.processes.environment import launch_variables, visible_devices, worker_environment
from atoll.agent.telemetry.devices import Device, cpu_model, find_devices, is_visible
from atoll.agent.telemetry.numa import NumaBinding
from atoll.errors import BadInput
from atoll.host.memory_limits import total_bytes
from atoll.v1.agents_pb2 import Launch
from atoll.v1.common_pb2 import WorkerId


class NVMLError(Exception):
    pass


def fake_nvml(count: int) -> SimpleNamespace:
    """NVML's functions as nvidia-ml-py has them, for a machine with `count` GPUs."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda ordinal: ordinal,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}{handle}aa",
        nvmlDeviceGetName=lambda handle: "NVIDIA GeForce RTX 3090",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30),
        nvmlDeviceGetMigMode=_no_parts,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=_no_part,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:F{handle}:1D.7"),
    )


def _no_parts(handle: int) -> tuple[int, int]:
    raise NVMLError("not supported")


def _no_part(handle: int, number: int) -> str:
    raise NVMLError("not found")


def in_two_parts(count: int) -> SimpleNamespace:
    """NVML of a machine whose first GPU is in two MIG parts, numbered 0 and 2."""
    nvml = fake_nvml(count)

    def part(handle: int, number: int) -> str:
        if number not in {0, 2}:
            raise NVMLError("not found")
        return f"{handle}/{number}"

    def uuid(handle: int | str) -> str:
        return f"MIG-{str(handle).replace('/', '')}bb" if isinstance(handle, str) else f"GPU-{handle}{handle}aa"

    nvml.nvmlDeviceGetMigMode = lambda handle: (int(handle == 0), 0)
    nvml.nvmlDeviceGetMigDeviceHandleByIndex, nvml.nvmlDeviceGetUUID = part, uuid
    return nvml


def test_machine_without_gpu_has_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise NVMLError("library not found")

    nvml = fake_nvml(0)
    nvml.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (cpu,) = find_devices(0.4)
    assert (cpu.index, cpu.kind, cpu.speed) == (0, "cpu", 0.4)
    assert cpu.memory_bytes == total_bytes()
    assert cpu.model


def test_gpus_are_those_left_to_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [d.visible_as for d in find_devices()] == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-33")
    found = find_devices()
    assert [(d.index, d.visible_as, d.model) for d in found] == [
        (0, "1", "NVIDIA GeForce RTX 3090"),
        (1, "3", "NVIDIA GeForce RTX 3090"),
    ]
    assert [d.uuid for d in found] == ["GPU-11aa", "GPU-33aa"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [d.kind for d in find_devices()] == ["cpu"]
    assert not is_visible("-1", 1, "GPU-1")


def test_a_gpu_that_is_partitioned_may_be_that_of_several_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents in containers see the whole GPU's id, each with a part of it: nobody may be refused for that."""
    nvml = fake_nvml(2)
    nvml.nvmlDeviceGetMigMode = lambda handle: (handle, handle)  # the second is
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [d.uuid for d in find_devices()] == ["GPU-00aa", ""]


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [
        (None, ["MIG-00bb", "MIG-02bb", "1"]),
        ("MIG-02bb", ["MIG-02bb"]),
        ("0", ["MIG-00bb", "MIG-02bb"]),
        ("GPU-11,MIG-00", ["MIG-00bb", "1"]),
        ("-1", []),
    ],
)
def test_parts_of_a_gpu_are_devices(monkeypatch: pytest.MonkeyPatch, allowed: str | None, seen: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES=MIG-... named no device, and the agent took the CPU. Each part is a device of its own."""
    monkeypatch.setitem(sys.modules, "pynvml", in_two_parts(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    found = find_devices()
    assert [d.visible_as for d in found if d.kind == "cuda"] == seen
    assert [d.index for d in found] == list(range(len(found)))
    assert [d.uuid for d in found if d.visible_as.startswith("MIG-")] == [name for name in seen if "MIG" in name]


def test_an_agent_announces_its_part_of_a_gpu_that_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (whole,), (part,) = find_devices(), find_devices(sharers=3)
    assert (whole.sharers, whole.memory_bytes) == (1, 24 << 30)
    assert (part.sharers, part.memory_bytes, part.uuid) == (3, 8 << 30, whole.uuid)
    env = worker_environment({}, {}, part, [part], local_rank=0, interface=None, threads=1, binding=None)
    assert env["ATOLL_DEVICE_SHARERS"] == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadInput, match=r"^--share-gpu: there is no GPU here"):
        find_devices(sharers=3)


def test_a_reading_that_nvml_does_not_have_leaves_the_gpus_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The first GPU shares the machine's memory, so NVML reports none. 2. The second is lost. 3. The third is on no
    PCI bus. One such reading made a CPU of all."""
    nvml = fake_nvml(3)
    whole, uuid, place = nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetPciInfo

    def refuse(handle: int, refused: int, answer: object) -> object:
        if handle == refused:
            raise NVMLError("not supported")
        return answer

    nvml.nvmlDeviceGetMemoryInfo = lambda handle: refuse(handle, 0, whole(handle))
    nvml.nvmlDeviceGetUUID = lambda handle: refuse(handle, 1, uuid(handle))
    nvml.nvmlDeviceGetPciInfo = lambda handle: refuse(handle, 2, place(handle))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = find_devices()
    assert [(d.index, d.visible_as, d.memory_bytes) for d in found] == [(0, "0", total_bytes()), (1, "2", 24 << 30)]


def test_model_of_a_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast One\n")
    assert cpu_model(cpuinfo) == "Fast One"
    assert cpu_model(tmp_path / "none")


def test_worker_finds_its_gpu_at_its_local_rank() -> None:
    """torchrun scripts take cuda:LOCAL_RANK. Here ranks 0 and 1 of a node have its GPUs 2 and 3."""
    gpus = [Device(n, "cuda", "RTX", 1, 1.0, visible_as=str(n)) for n in range(4)]
    assert visible_devices(gpus[2], gpus, 0) == ["2"]
    assert visible_devices(gpus[3], gpus, 1) == ["0", "3"]
    assert visible_devices(gpus[0], gpus, 2) == ["1", "2", "0"]
    parts = [Device(n, "cuda", "MIG 1g.10gb", 1, 1.0, visible_as=f"MIG-{n}") for n in range(2)]
    assert visible_devices(parts[1], parts, 1) == ["MIG-1"]  # CUDA shows the first part alone


def test_a_torchrun_script_finds_its_mig_part() -> None:
    """1. It takes cuda:LOCAL_RANK. The second worker of a node has its second MIG part, and no other device: cuda:1 is
    an invalid ordinal. 2. LOCAL_RANK is 0 there, and Atoll's own code still knows the worker's place on the node."""
    parts = [Device(n, "cuda", "MIG 1g.10gb", 1, 1.0, visible_as=f"MIG-{n}") for n in range(2)]
    launch = Launch(
        id=WorkerId(job="j", run=1, rank=1), world_size=2, local_rank=1, local_world_size=2, master_address="h"
    )
    env = launch_variables(launch, parts[1], agent_socket="ipc://s", secret="x") | {"MASTER_PORT": "5"}
    visible = visible_devices(parts[1], parts, launch.local_rank)
    assert visible[int(env["LOCAL_RANK"])] == "MIG-1"
    place = WorkerPlace.from_environment(env)
    assert (place.rank, place.local_rank, place.local_world_size) == (1, 1, 2)


def test_environment_of_a_gpu_worker() -> None:
    gpus = [Device(n, "cuda", "RTX", 1, 1.0, visible_as=str(n)) for n in range(2)]
    own = {"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "3", "WORLD_SIZE": "9", "KEY": "k", "RANK": "3"}
    launch = Launch(id=WorkerId(job="j", run=1), world_size=1, local_world_size=1, master_port=5)
    inherited = {"ATOLL_TOKEN": "secret", "HOME": "/root", "RANK": "4"}
    env = worker_environment(
        inherited, own, gpus[1], gpus, local_rank=0, interface="eth1", threads=2, binding=None
    ) | launch_variables(launch, gpus[1], agent_socket="ipc://s", secret="x")
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert env["ATOLL_DEVICE_KIND"] == "cuda"
    assert (env["WORLD_SIZE"], env["RANK"], env["OMP_NUM_THREADS"]) == ("1", "0", "3")
    assert (env["HOME"], env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("/root", "eth1", "eth1")
    assert env["KEY"] == "k"
    assert "ATOLL_TOKEN" not in env


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_workers_share_the_cores_and_the_job_has_the_last_word(kind: str) -> None:
    """1. Eight workers of a node took as many threads each as there are cores, and waited for each other. 2. Each has
    the cores over the node's devices, unless agent, environment or job say otherwise."""
    devices = [Device(n, kind, "x", 1, 1.0, visible_as=str(n)) for n in range(8)]
    own: dict[str, str] = {}

    def threads(
        devices: list[Device], inherited: dict[str, str], told: int | None, binding: NumaBinding | None = None
    ) -> str:
        env = worker_environment(
            inherited, own, devices[0], devices, local_rank=0, interface=None, threads=told, binding=binding
        )
        assert ("CUDA_VISIBLE_DEVICES" in env) == (kind == "cuda")
        return env["OMP_NUM_THREADS"]

    cores = len(os.sched_getaffinity(0))
    assert threads(devices, {}, None) == str(max(1, cores // 8))
    assert threads(devices[:1], {}, None) == str(cores)
    assert threads(devices, {}, None, NumaBinding(1, (4, 5, 6), 3)) == "3"
    assert threads(devices, {"OMP_NUM_THREADS": "7"}, None) == "7"
    assert threads(devices, {"OMP_NUM_THREADS": "7"}, 2) == "2"
    own["OMP_NUM_THREADS"] = "5"
    assert threads(devices, {"OMP_NUM_THREADS": "7"}, 2) == "5"
