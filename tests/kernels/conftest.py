from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll import kernels

sys.path.insert(0, str(Path(__file__).parent))  # for pipeline_job

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu])


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """Where the buffers lie: each test of a kernel's contract runs on the CPU and on a CUDA device."""
    name = str(request.param)
    if name == "cuda" and not kernels.has_cuda():
        pytest.skip("no CUDA device, or a build without nvcc: the CUDA kernels were NOT tested")
    return name
