"""The native engine behind the transport: several ranks in one process train the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from wire_rig import RUN, keys_of

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame, Kind
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.agent.runtime.transport.transport import Transport
from atoll.kernels.exchange_engine import GradientEngine

SIZES = [5, 16, 40_000, 300_000]
STEPS = 6
DEADLINE_S = 30.0


class Worker:
    def __init__(self, rank: int, members: Sequence[Member], transport: Transport) -> None:
        islands = [[m.rank for m in members if m.island == at] for at in range(1 + max(m.island for m in members))]
        self.rank, self.transport = rank, transport
        self.engine = GradientEngine(rank=rank, islands=islands)
        self.shared_params = [np.zeros(size, np.float32) for size in SIZES]
        self.endpoint = transport.bind()
        for order, shared_param in enumerate(self.shared_params):
            self.engine.add_tensor(
                order=order,
                rule="sgd",
                shared_param=shared_param,
                residual=np.zeros_like(shared_param),
                live=np.zeros_like(shared_param),
            )

    def connect(self, endpoints: Sequence[Endpoint]) -> None:
        self.transport.connect(endpoints, self.engine, self.deliver, self.engine.fail)

    def deliver(self, frame: Frame) -> str | None:
        assert frame.kind in {Kind.PART, Kind.SUM}
        return self.engine.deliver(int(frame.kind), frame.origin, frame.step, frame.tensor, frame.count, frame.payload)

    def train(self) -> None:
        random = np.random.default_rng(self.rank)
        for sync_round in range(STEPS):
            for tensor, size in enumerate(SIZES):
                gradient = random.standard_normal(size, dtype=np.float32)
                self.engine.compress(sync_round, tensor, gradient, 1.0, max(size // 160, 1))
            self.engine.apply(sync_round, sync_round + 1, [(0.1, 0.0, 0.0, 0.0, 0.0)])
            self.engine.fetch(range(len(SIZES)), sync_round, DEADLINE_S)

    def close(self) -> None:
        self.transport.close()
        self.engine.close()


@pytest.mark.parametrize("nodes", [["a", "a", "b", "b"], ["a", "b", "c", "d"]], ids=["shared", "tcp"])
@pytest.mark.parametrize("islands", ["xxyy", "xyzz", "xxxx"])
def test_all_ranks_hold_the_same_weights(nodes: list[str], islands: str) -> None:
    members, keys = members_of(nodes, list(islands)), keys_of(4)
    workers = [
        Worker(rank, members, Transport(rank, members, run=RUN, keys=keys[rank], host="127.0.0.1")) for rank in range(4)
    ]
    try:
        endpoints = [worker.endpoint for worker in workers]
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(worker.connect, endpoints) for worker in workers]:
                done.result(timeout=DEADLINE_S)
            for done in [pool.submit(worker.train) for worker in workers]:
                done.result(timeout=3 * DEADLINE_S)
        for tensor in range(len(SIZES)):
            shared_params = [worker.shared_params[tensor].tobytes() for worker in workers]
            assert len(set(shared_params)) == 1
            assert np.any(workers[0].shared_params[tensor])
        assert all(link.dropped == {} for worker in workers for link in worker.transport.links())
    finally:
        for worker in workers:
            worker.transport.goodbye()
        for worker in workers:
            worker.close()
