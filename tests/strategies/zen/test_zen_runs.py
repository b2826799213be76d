"""Whole runs of strategy zen: real worker processes, their own sockets between them. Each test is a story."""

from __future__ import annotations

import pytest
from held_ports import free_port
from zmq_agent import Start, torchrun_like

pytestmark = pytest.mark.timeout(120)


def ports(count: int) -> str:
    return ",".join(str(free_port()) for _ in range(count))


@pytest.mark.parametrize("islands", [(), ("west", "west", "east"), ("a", "b", "c")], ids=["one", "two", "three"])
def test_it_trains_what_dense_trains_and_what_one_process_trains(start: Start, islands: tuple[str, ...]) -> None:
    """1. Sparse gradients of Embedding and EmbeddingBag by SGD with and without momentum, Adagrad and SparseAdam, with
    accumulation: the weights are those of one process that trains the whole batch. 2. By each scheme, sparse and dense
    gradients: the weights are those of strategy dense, with two ranks bit for bit."""
    world_size = len(islands) or 2
    codes = torchrun_like("zen_equals_dense.py", ports(40), world_size=world_size, islands=islands, start=start)
    assert codes == [0] * world_size
