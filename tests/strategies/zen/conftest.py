from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for circle_rig

from strategy_runs import Tensors, undisturbed
from zmq_agent import Start


@pytest.fixture(scope="session")
def calm(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tensors]:
    """Weights that a run by scheme zen ends with which nobody disturbs; one run for all who ask for the same."""

    @functools.cache
    def weights(*arguments: str, world_size: int = 2) -> Tensors:
        out = tmp_path_factory.mktemp("calm") / "out"
        return undisturbed("zen", out, start, *arguments, world_size=world_size, scheme="zen")

    return weights
