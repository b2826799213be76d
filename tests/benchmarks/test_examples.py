"""Examples that no other test runs, each alone, on little data; and the demo."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def mnist() -> dict[str, torch.Tensor]:
    if find_spec("mnist") is None:
        pytest.skip("mnist is not here: the example was NOT run (make setup installs it)")
    decoded: dict[str, torch.Tensor] = runpy.run_path(str(EXAMPLES / "data.py"))["_decode_mnist"]()
    return decoded


def write_mnist(cache: Path, decoded: dict[str, torch.Tensor], *, one_in: int) -> None:
    """Write a part of MNIST where the examples look for all of it."""
    (cache / "atoll-examples").mkdir()
    part = {name: rows[: len(rows) // one_in].clone() for name, rows in decoded.items()}
    save_file(part, cache / "atoll-examples" / "mnist.safetensors")


def run_example(cache: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        (sys.executable, EXAMPLES / script, *arguments),
        cwd=cache,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "reports"),
    [
        ("mnist_cnn.py", r"epoch 1: test accuracy [3-9]\d\."),
        ("mnist_gan.py", r"epoch 1: the average image is 0\.\d+"),
    ],
)
def test_an_example_trains_alone_on_mnist(
    script: str, reports: str, mnist: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_mnist(tmp_path, mnist, one_in=20)
    printed = run_example(tmp_path, script, "--epochs", "1", "--batch-size", "100")
    assert re.search(reports, printed), printed


@pytest.mark.timeout(300)
def test_byte_gpt_trains_alone(tmp_path: Path) -> None:
    """Train on a page: tests/benchmarks/test_words_example.py decodes the packages with the text."""
    page = (EXAMPLES.parent / "README.md").read_bytes()
    (tmp_path / "atoll-examples").mkdir()
    text = {"bytes": torch.frombuffer(bytearray(page), dtype=torch.uint8)}
    save_file(text, tmp_path / "atoll-examples" / "text.safetensors")
    printed = run_example(tmp_path, "byte_gpt.py", "--context", "32", "--batch-size", "8")
    assert re.search(r"epoch 1: loss ([2-9]|1\d)\.\d+", printed), printed


@pytest.mark.timeout(300)
def test_the_demo_loses_a_worker_and_ends_well(mnist: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Train on a sixth of MNIST: the demo kills a worker at step 30 of then 60."""
    write_mnist(tmp_path, mnist, one_in=6)
    printed = run_example(tmp_path, "demo.py")
    assert re.search(r"=== killing the worker of rank 1 \(pid \d+\)", printed)
    assert re.search(r"=== done in \d+ s", printed)
