"""Places a kernel's call: on the CPU, on the buffers' CUDA device, or on the CPU with copies of the device's buffers.

The last is for devices that this build has no code for: old cards, builds without nvcc, ROCm. The CPU twin then works
on copies and what it wrote is copied back, so the bits are the twin's. It takes the time of the copies.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from types import ModuleType
from typing import Any, Final, NamedTuple

from atoll.kernels.refusals import refusals

_cuda: ModuleType | None
try:
    _cuda = importlib.import_module("atoll.kernels._cuda")
except ModuleNotFoundError:  # built without nvcc
    _cuda = None

_OLDEST_FOR_NVCC_12: Final = (6, 0)  # kernels/CMakeLists.txt
ARGUMENTS: Final = {
    name: arguments.split()
    for name, arguments in {
        "threshold_block": "gradient *residual weight threshold *index *values",
        "topk_block": "gradient *residual weight *index *values",
        "random_block": "gradient *residual weight seed *index *values",
        "sample_scores": "gradient residual weight seed *scores",
        "sign_encode": "*values *bits *scales two_sided",
        "sign_add": "bits scales *out two_sided",
    }.items()
}
"""Kernels with a native twin on the CPU. A star marks a buffer that the kernel writes."""


class NoCode(NamedTuple):
    """The cause for which a device's kernels run on the CPU."""

    reason: str
    next_step: str


class CudaQueue(NamedTuple):
    """The CUDA kernels, and the stream (a cudaStream_t) that their work goes to."""

    kernels: ModuleType
    stream: int

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.kernels, name)(*arguments, self.stream)


def has_cuda() -> bool:
    """True if this build has the CUDA kernels and the machine a driver with a device for them."""
    return _cuda is not None and _cuda.device_count() > 0


def missing_code(capability: tuple[int, int]) -> NoCode | None:
    """Return why this build's CUDA kernels cannot run on a device of this compute capability; None: they can.

    Each architecture is in the build as machine code and as PTX, which the driver compiles for newer devices.
    """
    if _cuda is None:
        return NoCode(
            "this build of atoll has no CUDA kernels",
            "install nvcc or set CUDA_HOME, then from source: pip install --force-reinstall --no-cache-dir --no-deps .",
        )
    oldest = divmod(min(_cuda.architectures), 10)
    if capability < oldest:
        step = (
            "set CUDA_HOME to CUDA 12, whose nvcc compiles for it, and build atoll from source"
            if capability >= _OLDEST_FOR_NVCC_12
            else "no supported nvcc compiles for it"
        )
        return NoCode(
            f"the CUDA kernels of this build need compute capability {_dotted(oldest)}, the device has "
            f"{_dotted(capability)}",
            step,
        )
    if _cuda.device_count() == 0:
        return NoCode(
            "the CUDA kernels of this build find no device",
            "update the NVIDIA driver: it is older than the CUDA that the kernels were built with, or shows no device",
        )
    return None


def why_on_cpu(device: Any) -> NoCode | None:
    """Return why kernels on tensors of this torch.device run on the CPU though it is a GPU; None: they run on it."""
    return _why_on_cpu(device.index) if device.type == "cuda" else None


@cache
def _why_on_cpu(index: int | None) -> NoCode | None:
    torch = sys.modules["torch"]  # the caller has a torch tensor, so torch is loaded; this package never loads it
    if torch.version.hip is not None:
        return NoCode("the CUDA kernels are for NVIDIA devices, torch uses ROCm", "no kernels for ROCm exist")
    return missing_code(torch.cuda.get_device_capability(index))


def _device_of(arguments: Sequence[Any]) -> Any | None:
    """Return the torch.device of the first CUDA tensor; None: there is none."""
    return next((one.device for one in arguments if getattr(one, "is_cuda", False)), None)


def queue_of(arguments: Sequence[Any]) -> CudaQueue | None:
    """Return the queue that a call with these arguments goes to; None: they are on the CPU or on a device without code.

    The first CUDA tensor among them decides; the kernel refuses others.
    """
    device = _device_of(arguments)
    if device is None or _cuda is None or why_on_cpu(device) is not None:
        return None
    return CudaQueue(_cuda, int(sys.modules["torch"].cuda.current_stream(device).cuda_stream))


def run(name: str, twin: Callable[..., Any], *arguments: Any, threads: int | None = None) -> Any:
    """Call a kernel where its buffers are. Raises BadInput for what does not fit.

    twin: the kernel on the CPU, which takes the same arguments and `threads`, where that is given.
    """
    options = {} if threads is None else {"threads": threads}
    with refusals(name):
        if (queue := queue_of(arguments)) is not None:
            return queue.call(name, *arguments)
        if _device_of(arguments) is not None:
            return _run_on_copies(name, twin, arguments, options)
        return twin(*arguments, **options)


def _run_on_copies(name: str, twin: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, int]) -> Any:
    """Copying waits for the work that is queued on torch's current stream, and the caller waits for the copies."""
    torch = sys.modules["torch"]
    named = dict(zip(ARGUMENTS[name], arguments, strict=True))
    buffers = {key: one for key, one in named.items() if isinstance(one, torch.Tensor)}
    _refuse_separate_devices(buffers)
    _refuse_overlap(buffers)
    copies = {key: _copied(torch, one) for key, one in buffers.items()}
    result = twin(*(named | copies).values(), **options)
    for key, copy in copies.items():
        if key.startswith("*"):
            buffers[key].copy_(copy)
    return result


def _copied(torch: Any, buffer: Any) -> Any:
    """Return a copy with the same strides, so that the twin refuses what is not contiguous."""
    copy = torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype)
    return copy.copy_(buffer.detach())


def _refuse_separate_devices(buffers: Mapping[str, Any]) -> None:
    first = next(iter(buffers))
    for name, one in buffers.items():
        if one.device != buffers[first].device:
            raise TypeError(f"{name.strip('*')} is on another device than {first.strip('*')}; move it there first")


def _refuse_overlap(buffers: Mapping[str, Any]) -> None:
    """The twin cannot see that buffers overlap: its copies do not."""
    spans = {name: (one.data_ptr(), one.data_ptr() + one.nbytes) for name, one in buffers.items() if one.nbytes}
    for (a, (a_begin, a_end)), (b, (b_begin, b_end)) in combinations(spans.items(), 2):
        if "*" in a + b and a_begin < b_end and b_begin < a_end:
            raise ValueError(f"{a.strip('*')} and {b.strip('*')} share memory; pass separate buffers")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
