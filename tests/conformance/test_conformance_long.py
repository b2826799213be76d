"""The cells of the conformance matrix that cost seconds each: compiled models, loaders with worker processes, trainers
of other frameworks, and workers that are lost or join."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from cases import SLOW_WRAPPERS, TRAINERS, long_events, long_wrappers
from pool import WorkerPool
from verdict import failures
from zmq_agent import Start

WRAPPED = long_wrappers([one for one in SLOW_WRAPPERS if one not in TRAINERS])
LIBRARIES = {"huggingface": "transformers", "lightning": "pytorch_lightning", "accelerate": "accelerate"}


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, of a graph it breaks
def test_every_pair_with_a_slow_wrapper_trains_as_plain_torch(start: Start, tmp_path: Path) -> None:
    with WorkerPool(start, tmp_path) as pool:
        assert failures(WRAPPED, pool) == []


@pytest.mark.timeout(900)
def test_every_pair_with_a_lost_worker_or_one_that_joins_trains_as_plain_torch(start: Start, tmp_path: Path) -> None:
    with WorkerPool(start, tmp_path) as pool:
        assert failures(long_events(), pool) == []


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # the trainers', of each other and of torch
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_pair_with_a_trainer_trains_as_the_trainer_alone(start: Start, tmp_path: Path, trainer: str) -> None:
    if find_spec(LIBRARIES[trainer]) is None:
        pytest.skip(f"{LIBRARIES[trainer]} is not here: its adapter was NOT tested (make setup installs it)")
    with WorkerPool(start, tmp_path) as pool:
        assert failures(long_wrappers([trainer]), pool) == []
