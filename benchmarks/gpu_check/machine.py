"""Stage 0: what the machine is, and what Atoll finds on it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

from gpu_check.rows import Rows

COMMAND_LIMIT_S: Final = 30.0
ASKED_OF_SMI: Final = "name,driver_version,memory.total,compute_cap,mig.mode.current,clocks.max.sm,clocks.max.mem"


def run(device: str, rows: Rows) -> None:
    _versions(device, rows)
    _nvidia_smi(device, rows)
    _doctor(rows)
    _devices(device, rows)
    _work(device, rows)


def _versions(device: str, rows: Rows) -> None:
    import torch

    from atoll import kernels

    named = ", ".join(f"{name} {metadata.version(name)}" for name in ("atoll", "torch", "numpy", "grpcio", "protobuf"))
    cuda = f"CUDA {torch.version.cuda}"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        cuda += f", NCCL {nccl}, {torch.cuda.get_device_name()}, sm_{major}{minor}"
    rows.check("versions", True, f"Python {platform.python_version()}, {named}, {cuda}")
    if device == "cpu":
        rows.skip("CUDA kernels", "the check runs without a GPU")
    else:
        rows.check(
            "CUDA kernels", kernels.has_cuda(), "in this build, and usable" if kernels.has_cuda() else "not usable"
        )


def _nvidia_smi(device: str, rows: Rows) -> None:
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        rows.skip("nvidia-smi", "it is not here" if device == "cuda" else "the check runs without a GPU")
        return
    code, said = _output(["nvidia-smi", f"--query-gpu={ASKED_OF_SMI}", "--format=csv,noheader"])
    rows.check("nvidia-smi", code == 0, said.strip())


def _doctor(rows: Rows) -> None:
    """A finding that is broken fails the row, but for the cluster and etcd, which need not be here."""
    _, said = _output([sys.executable, "-P", "-m", "atoll.cli.main", "doctor", "--json"])
    try:
        findings = json.loads(said[said.index("{") :])["findings"]
    except ValueError:
        rows.check("atoll doctor", False, said)
        return
    for one in findings:
        text = f"{one['verdict']}: {one['found']}"
        wrong = one["verdict"] == "broken" and one["subject"] in {"python", "kernels", "torch", "gpus", "/dev/shm"}
        if wrong or one["subject"] in {"kernels", "torch", "gpus", "numa"}:
            rows.check(f"doctor: {one['subject']}", not wrong, text)


def _devices(device: str, rows: Rows) -> None:
    from atoll.agent.telemetry.devices import find_devices

    found = find_devices()
    rows.check("the agent's devices", found[0].kind == device, "; ".join(map(str, found)))


def _work(device: str, rows: Rows) -> None:
    module = "atoll.agent.runtime.cuda_work" if device == "cuda" else "atoll.agent.telemetry.cpu_work"
    code, said = _output([sys.executable, "-P", "-m", module])
    rates = json.loads(said) if code == 0 else []
    rows.check("work measured", bool(rates) and min(rates) > 0, said.strip(), tflops=max(rates, default=0.0) / 1e12)


def _output(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr
