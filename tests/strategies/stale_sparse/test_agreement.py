"""Ranks that talk through a list of messages, delivered when the test says so."""

from __future__ import annotations

import threading

import pytest

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.transport.agreement import KEPT_PASSES, Agreement
from atoll.errors import BadInput, PeerLost

DEADLINE_S = 5.0


def batch_slice(step: int, start: int = 0) -> BatchSlice:
    return BatchSlice(step=step, epoch=0, start=start, total=8, local=4, weight=0.5)


class Ranks:
    """Three ranks; what one says waits in `sent` for the test."""

    def __init__(self, count: int = 3) -> None:
        self.sent: list[tuple[int, int, bytes]] = []
        self.all = [Agreement(rank, count, self._teller(rank)) for rank in range(count)]

    def _teller(self, rank: int):
        return lambda number, payload: self.sent.append((rank, number, payload))

    def deliver(self) -> list[str | None]:
        replies = [
            other.heard(number, rank, payload)
            for rank, number, payload in self.sent
            for index, other in enumerate(self.all)
            if index != rank
        ]
        self.sent.clear()
        return replies


def test_the_oldest_plan_and_any_stop_is_what_all_act_on() -> None:
    ranks = Ranks()
    for agreement, plan, stop in zip(ranks.all, (5, 3, 4), (False, False, True), strict=True):
        agreement.propose(1, batch_slice(0), Agreed(plan, stop))
    assert ranks.deliver() == [None] * 6
    assert [one.act_on(1, DEADLINE_S)[0] for one in ranks.all] == [Agreed(3, True)] * 3


def test_a_rank_alone_agrees_with_itself_and_tells_nobody() -> None:
    ranks = Ranks(1)
    ranks.all[0].propose(1, batch_slice(0), Agreed(2, False))
    assert ranks.sent == []
    assert ranks.all[0].act_on(1, DEADLINE_S)[0] == Agreed(2, False)


def test_words_of_later_passes_wait_for_their_turn() -> None:
    ranks = Ranks(2)
    for number in (1, 2, 3):
        ranks.all[1].propose(number, batch_slice(number - 1), Agreed(number, False))
    ranks.deliver()
    for number in (1, 2, 3):
        ranks.all[0].propose(number, batch_slice(number - 1), Agreed(9, False))
        assert ranks.all[0].act_on(number, DEADLINE_S)[0] == Agreed(number, False)


def test_who_waits_is_woken_by_the_last_word_and_says_how_long_it_waited() -> None:
    ranks = Ranks(2)
    ranks.all[0].propose(1, batch_slice(0), Agreed(1, False))
    ranks.all[1].propose(1, batch_slice(0), Agreed(1, False))
    got: list[tuple[Agreed, float]] = []
    waiter = threading.Thread(target=lambda: got.append(ranks.all[0].act_on(1, DEADLINE_S)))
    waiter.start()
    ranks.deliver()
    waiter.join(timeout=DEADLINE_S)
    assert got[0][0] == Agreed(1, False)
    assert 0 <= got[0][1] < DEADLINE_S


def test_a_silent_rank_is_named_after_the_deadline() -> None:
    ranks = Ranks()
    ranks.all[0].propose(1, batch_slice(0), Agreed(1, False))
    ranks.all[1].propose(1, batch_slice(0), Agreed(1, False))
    ranks.deliver()
    with pytest.raises(PeerLost, match="rank 2 said nothing of pass 1"):
        ranks.all[0].act_on(1, 0.05)


def test_a_lost_peer_wakes_who_waits() -> None:
    ranks = Ranks(2)
    ranks.all[0].propose(1, batch_slice(0), Agreed(1, False))
    ranks.all[0].fail("rank 1 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ranks.all[0].act_on(1, DEADLINE_S)


def test_ranks_at_different_batches_are_told_so() -> None:
    ranks = Ranks(2)
    ranks.all[0].propose(1, batch_slice(7, start=56), Agreed(1, False))
    ranks.all[1].propose(1, batch_slice(7, start=64), Agreed(1, False))
    ranks.deliver()
    with pytest.raises(BadInput, match="rank 1 step 7 at 64"):
        ranks.all[0].act_on(1, DEADLINE_S)


def test_what_makes_no_sense_is_refused_with_a_reason() -> None:
    ranks = Ranks(2)
    ranks.all[1].propose(1, batch_slice(0), Agreed(1, False))
    (_, _, word) = ranks.sent[0]
    listener = ranks.all[0]
    assert listener.heard(1, 1, word[:-1]) == "malformed"
    assert listener.heard(1, 0, word) == "malformed", "nobody else speaks for this rank"
    assert listener.heard(1, 2, word) == "malformed", "there is no rank 2"
    assert listener.heard(1 + KEPT_PASSES, 1, word) == "step too far ahead"
    assert listener.heard(1, 1, word) is None
    assert listener.heard(1, 1, word) == "twice"
    listener.propose(1, batch_slice(0), Agreed(1, False))
    listener.act_on(1, DEADLINE_S)
    assert listener.heard(1, 1, word) == "old step"
