"""The cells of the conformance matrix that cost seconds each: compiled models and loaders with worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import STRATEGIES, long
from pool import WorkerPool
from verdict import failures
from zmq_agent import Start

CASES = long()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_with_a_dear_wrapper_trains_as_plain_torch(start: Start, tmp_path: Path, strategy: str) -> None:
    with WorkerPool(start, tmp_path) as pool:
        assert failures([case for case in CASES if case.strategy == strategy], pool) == []
