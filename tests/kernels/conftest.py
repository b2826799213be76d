from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from atoll import kernels
from atoll.kernels import cuda_device
from atoll.kernels.cuda_device import CudaQueue, NoCode

sys.path.insert(0, str(Path(__file__).parent))  # for cuda_on_cpu, kernels_of, exchange_job, own_threads

import cuda_on_cpu
from kernels_of import Kernels

torch.set_num_threads(1)  # several that wait for each other, beside other processes, spin most of their time away

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu])
ON_CPU = pytest.param("cuda on cpu", marks=[pytest.mark.timeout(900)])  # the first test compiles the kernels
NO_GPU = "no NVIDIA GPU here, or a build without nvcc: the CUDA kernels were NOT tested on a device"


@pytest.fixture(params=["cpu", CUDA, ON_CPU, "copied to the cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the buffers: each test of a kernel's contract runs on the CPU and on a CUDA device.

    On buffers of the CPU too: with the CUDA kernels compiled for it, and as if the buffers were those of a device for
    which this build has no code.
    """
    name = str(request.param)
    if name == "cuda" and not kernels.has_cuda():
        pytest.skip(NO_GPU)
    if name == "copied to the cpu":
        request.getfixturevalue("without_code")
        return "cpu"
    if name != "cuda on cpu":
        return name
    queue = CudaQueue(request.getfixturevalue("cuda_kernels_on_cpu"), 0)
    monkeypatch.setattr(cuda_device, "queue_of", lambda _arguments: queue)
    return "cpu"


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU's tensors for those of a CUDA device for which this build has no code."""
    monkeypatch.setattr(
        cuda_device, "_device_of", lambda arguments: next((x.device for x in arguments if torch.is_tensor(x)), None)
    )
    monkeypatch.setattr(cuda_device, "why_on_cpu", lambda _device: NoCode("a test", "none"))


@pytest.fixture
def everywhere(device: str) -> Iterator[str]:
    """As `device`, and tensors are made there unless a test says otherwise."""
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture(params=[CUDA, ON_CPU])
def twin(request: pytest.FixtureRequest) -> Kernels:
    """The CUDA kernels as the package calls them, on a device and compiled for the CPU."""
    if request.param == "cuda on cpu":
        return Kernels(request.getfixturevalue("cuda_kernels_on_cpu"), "cpu", (0,))
    queue = cuda_device.queue_of((torch.zeros(1, device="cuda"),)) if kernels.has_cuda() else None
    if queue is None:
        pytest.skip(NO_GPU)
    return Kernels(queue.kernels, "cuda", (queue.stream,))


@pytest.fixture(scope="session")
def cuda_kernels_on_cpu() -> ModuleType:
    try:
        return cuda_on_cpu.load()
    except cuda_on_cpu.NoCompiler as missing:
        pytest.skip(f"{missing}: the CUDA kernels were NOT run on the CPU either")
