"""A loss stops an aggregator in the middle of a sync round: nothing is counted twice, and nothing is missed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.agent.runtime.model.durable import OwnState
from atoll.agent.runtime.transport.frames import Kind
from atoll.kernels.exchange_engine import Outgoing
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import ExchangeOptions, ExchangePace, LayerExchange
from atoll.strategies.shared_params.layout import lay_out_for_updates
from atoll.strategies.shared_params.state import SharedParamsState

ENTRIES = 1 << 20  # a task takes a millisecond or more, time enough to stop the engine before the next
BLOCKS = ENTRIES // 16
OPTIONS = ExchangeOptions(exchange="updates", values="float32", selection="topk", digest_every=0, aggregators=True)
SHARE = 0.5  # of either rank in a batch
WAIT_S = 30.0


class Meeting:
    """A group of two ranks, each on its own thread."""

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._barrier = threading.Barrier(2, timeout=WAIT_S)

    def group_of(self, rank: int) -> Any:
        def gather_rows(row: Sequence[int]) -> list[list[int]]:
            self._rows[rank] = list(row)
            self._barrier.wait()
            return [self._rows[0], self._rows[1]]

        return SimpleNamespace(gather_rows=gather_rows)


class Rank:
    """One of two islands of one rank each. Rank 0 owns the only layer."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self._random = rank, torch.Generator().manual_seed(rank)
        torch.manual_seed(3)
        self.layer = lay_out_for_updates(nn.Linear(ENTRIES, 1, bias=False))[0]
        self.tensor = EngineTensor.of(self.layer)
        self.exchange = LayerExchange([self.tensor], WAIT_S)
        place = SimpleNamespace(rank=rank, world_size=2)
        session: Any = SimpleNamespace(
            place=place,
            seed=7,
            device=torch.device("cpu"),
            group=meeting.group_of(rank),
            notice=lambda level, text: pytest.fail(text),
        )
        self.exchange.start(session, OPTIONS, [[0], [1]], ExchangePace(0.5, 0.5, 0.25))
        self.engine = self.exchange.engine
        self.exchange.set_live(self.tensor, None, SHARE)
        optimizer: Any = None
        self.state = SharedParamsState(session, self.exchange, optimizer, "live", lambda: 0)
        self.state.adopted = True
        self.begun, self.updates = self.shared_param(), torch.zeros(ENTRIES, dtype=torch.float64)

    def shared_param(self) -> torch.Tensor:
        return self.exchange.read_shared_param(self.tensor).double()

    def update(self, sync_round: int) -> None:
        """Move the weights as an optimizer would, and let the engine choose the round's part: half of the blocks."""
        way = torch.randn(ENTRIES, generator=self._random)
        self.layer.live.sub_(way)
        self.updates += SHARE * way.double()
        self.engine.sum_updates(sync_round, SHARE, [BLOCKS // 2], [BLOCKS // 4])
        self.engine.idle(WAIT_S)

    def take(self, sender: Rank, messages: Sequence[Outgoing]) -> None:
        for one in messages:
            refused = self.engine.deliver(one.kind, sender.rank, one.sync_round, 0, one.count, one.payload)
            assert refused is None

    def own_state(self, source: Rank) -> OwnState:
        self.state.freeze()
        survivor = self.state.survivor_state()
        assert survivor is not None
        return survivor.relative_to(source.state.shared())


def stop_between_sum_and_shared_param(aggregator: Rank, other: Rank) -> None:
    """Train until the engine of `aggregator` stands still where its sum has a round that its shared_param has not."""
    for sync_round in range(1, 100):
        for rank in (aggregator, other):
            rank.update(sync_round)
        aggregator.engine.quiesce(WAIT_S)
        aggregator.take(other, other.engine.take_outgoing())
        while aggregator.engine.versions()[0] < sync_round:
            aggregator.engine.resume()
            aggregator.engine.quiesce(WAIT_S)  # at most one task began meanwhile, if this thread was not interrupted
            recent = aggregator.engine.recent_parts()
            is_summed = any(part.kind == Kind.FROM_AGGREGATOR and part.sync_round == sync_round for part in recent)
            if is_summed and aggregator.engine.versions()[0] < sync_round:
                return
        aggregator.engine.resume()
        other.take(aggregator, aggregator.engine.take_outgoing())
        for rank in (aggregator, other):
            rank.engine.fetch([0], sync_round, WAIT_S)
    pytest.fail("the engine never stopped between the two tasks")


@pytest.mark.parametrize("arrives", [False, True], ids=["total is lost", "total arrives"])
def test_a_round_that_an_aggregator_has_summed_counts_once(arrives: bool) -> None:
    """1. The aggregator has added a round to its sum and made the total, and its engine is frozen before its own shared
    parameter takes that. 2. The other rank is the source of the shared parameters: with the total, or without. 3.
    Shared parameters, residuals and the aggregator's sum together are all updates, as plain addition has them."""
    meeting = Meeting()
    aggregator, other = Rank(0, meeting), Rank(1, meeting)
    with closing(aggregator.exchange), closing(other.exchange), ThreadPoolExecutor(2) as threads:
        stop_between_sum_and_shared_param(aggregator, other)
        if arrives:
            other.take(aggregator, aggregator.engine.take_outgoing())
            other.engine.idle(WAIT_S)
        states = list(threads.map(lambda rank: rank.own_state(source=other), (aggregator, other)))
        sums = states[0].aggregator_sums[aggregator.layer.name].double()
        residuals = sum(state.residual[aggregator.layer.name].double() for state in states)
        counted = other.begun - other.shared_param() + residuals + sums
        torch.testing.assert_close(counted, aggregator.updates + other.updates, rtol=0, atol=1e-4)
        assert sums.any()
        assert other.engine.versions() == [aggregator.engine.versions()[0] + arrives]
