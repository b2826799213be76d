"""The cells of the conformance matrix that cost seconds each: compiled models, loaders with worker processes, and the
trainers of other frameworks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from cases import DEAR, STRATEGIES, TRAINERS, long
from pool import WorkerPool
from verdict import failures
from zmq_agent import Start

CASES = long([one for one in DEAR if one not in TRAINERS])
LIBRARIES = {"huggingface": "transformers", "lightning": "pytorch_lightning", "accelerate": "accelerate"}


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, of a graph it breaks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_with_a_dear_wrapper_trains_as_plain_torch(start: Start, tmp_path: Path, strategy: str) -> None:
    with WorkerPool(start, tmp_path) as pool:
        assert failures([case for case in CASES if case.strategy == strategy], pool) == []


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # the trainers', of each other and of torch
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_pair_with_a_trainer_trains_as_the_trainer_alone(start: Start, tmp_path: Path, trainer: str) -> None:
    if find_spec(LIBRARIES[trainer]) is None:
        pytest.skip(f"{LIBRARIES[trainer]} is not here: its adapter was NOT tested (make setup installs it)")
    with WorkerPool(start, tmp_path) as pool:
        assert failures(long([trainer]), pool) == []
