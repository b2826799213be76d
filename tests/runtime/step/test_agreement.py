"""Ranks that propose through a list of messages, delivered when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.agent.runtime.channel.agreement import MAX_SAMPLES, Agreed, Agreement, Meeting, Proposal, merged
from atoll.agent.runtime.channel.proposals import KEPT_PASSES, BroadcastProposals
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.errors import BadInput, PeerLost

DEADLINE_S = 30.0
NOTHING = Agreed(0, False)
END = {"step": Meeting.END.step, "samples": 0, "total": 0}


def batch_slice(step: int, start: int = 0, total: int = 8) -> BatchSlice:
    return BatchSlice(step=step, epoch=0, start=start, total=total, local=4, weight=0.5, share=0.5)


class Ranks:
    """Three ranks; what one proposes waits in `sent` for the test."""

    def __init__(self, count: int = 3, *, lag: int = 0, deadline_s: float = DEADLINE_S, at_once: bool = False) -> None:
        """at_once: what one proposes is delivered as it is sent."""
        self.at_once = at_once
        self.sent: list[tuple[int, int, bytes]] = []
        self.exchanges = [BroadcastProposals(rank, count, self._sender(rank)) for rank in range(count)]
        self.all = [Agreement(one, NOTHING, lag=lag, deadline_s=deadline_s) for one in self.exchanges]

    def _sender(self, rank: int) -> Callable[[int, bytes], None]:
        def send(number: int, payload: bytes) -> None:
            self.sent.append((rank, number, payload))
            if self.at_once:
                self.deliver()

        return send

    def deliver(self) -> list[str | None]:
        replies = [
            other.hear(number, rank, payload)
            for rank, number, payload in self.sent
            for index, other in enumerate(self.exchanges)
            if index != rank
        ]
        self.sent.clear()
        return replies


def test_the_oldest_plan_and_any_stop_is_what_all_act_on() -> None:
    ranks = Ranks()
    for agreement, plan, stop in zip(ranks.all, (5, 3, 4), (False, False, True), strict=True):
        agreement.propose(batch_slice(0), Agreed(plan, stop))
    assert ranks.deliver() == [None] * 6
    for agreement in ranks.all:
        agreement.act()
    assert [one.reached(NOTHING) for one in ranks.all] == [Agreed(3, True)] * 3


def test_a_rank_alone_agrees_with_itself_and_tells_nobody() -> None:
    ranks = Ranks(1)
    ranks.all[0].propose(batch_slice(0), Agreed(2, False))
    assert ranks.sent == []
    ranks.all[0].act()
    assert ranks.all[0].reached(NOTHING) == Agreed(2, False)
    alone = Agreement(None, NOTHING, lag=0, deadline_s=DEADLINE_S)
    alone.propose(batch_slice(0), Agreed(2, False))
    assert alone.act() == 0
    assert alone.reached(Agreed(3, True)) == Agreed(3, True)


def test_proposals_of_later_passes_wait_for_their_turn() -> None:
    ranks = Ranks(2)
    for number in (1, 2, 3):
        ranks.all[1].propose(batch_slice(number - 1), Agreed(number, False))
    ranks.deliver()
    for number in (1, 2, 3):
        ranks.all[0].propose(batch_slice(number - 1), Agreed(9, False))
        ranks.all[0].act()
        assert ranks.all[0].reached(NOTHING) == Agreed(number, False)


def test_with_a_lag_nobody_waits_for_proposals_of_the_pass_that_is_over() -> None:
    """1. After the first pass there is nothing to act on. 2. After the second the first one's proposals hold, though
    nothing came of the second. 3. Asked again, nothing is waited for."""
    ranks = Ranks(2, lag=1)
    for agreement in ranks.all:
        agreement.propose(batch_slice(0), Agreed(4, False))
    ranks.deliver()
    assert ranks.all[0].act() == 0
    assert ranks.all[0].reached(NOTHING) == NOTHING
    ranks.all[0].propose(batch_slice(1), Agreed(5, True))
    ranks.all[0].act()
    assert ranks.all[0].reached(NOTHING) == Agreed(4, False)
    assert ranks.all[0].act() == 0


def test_who_waits_is_woken_by_the_last_proposal_and_says_how_long_it_waited() -> None:
    ranks = Ranks(2)
    for agreement in ranks.all:
        agreement.propose(batch_slice(0), Agreed(1, False))
    waited_s: list[float] = []
    waiter = threading.Thread(target=lambda: waited_s.append(ranks.all[0].act()))
    waiter.start()
    ranks.deliver()
    waiter.join(timeout=DEADLINE_S)
    assert ranks.all[0].reached(NOTHING) == Agreed(1, False)
    assert 0 <= waited_s[0] < DEADLINE_S


def test_a_silent_rank_is_named_after_the_deadline() -> None:
    ranks = Ranks(deadline_s=0.05)
    for agreement in ranks.all[:2]:
        agreement.propose(batch_slice(0), Agreed(1, False))
    ranks.deliver()
    with pytest.raises(PeerLost, match="rank 2 said nothing of pass 1"):
        ranks.all[0].act()


def test_a_lost_peer_wakes_who_waits() -> None:
    ranks = Ranks(2)
    ranks.all[0].propose(batch_slice(0), Agreed(1, False))
    ranks.exchanges[0].fail("rank 1 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ranks.all[0].act()


def test_ranks_at_different_batches_are_told_so() -> None:
    ranks = Ranks(2)
    ranks.all[0].propose(batch_slice(7, start=56), Agreed(1, False))
    ranks.all[1].propose(batch_slice(7, start=64), Agreed(1, False))
    ranks.deliver()
    with pytest.raises(BadInput, match="in step 7: rank 0 is at sample 56 of epoch 0, rank 1 at 64 of 0"):
        ranks.all[0].act()


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        (
            {},
            {"step": 8},
            "out of step: rank 0 is in step 7, rank 1 in step 8. Every rank must call run.backward equally",
        ),
        ({}, {"total": 9}, "different batches in step 7: .* not on a local loss"),
        (
            {},
            {"step": 8, "skipped": 1},
            "rank 1 skipped a batch that others trained, before step 8.* multiply the loss",
        ),
        ({"unreached": 1, "updates": 1}, {}, r"rank 0 called optimizer.step\(\) for a batch of which no backward pass"),
        ({}, {"samples": 24}, "dataset has 20 samples on rank 0 and 24 on rank 1 in epoch 0.*alike on every"),
        ({"samples": 0}, {"samples": 0, "place": MAX_SAMPLES}, "at 0 of 1. The stream is not as long on every rank"),
        ({"samples": 0}, {"samples": 0, "total": 3}, "stream is not as long on every rank.* itertools.islice"),
        (
            {"samples": 0},
            END,
            "rank 0 trains step 7, rank 1 is at the end of its last epoch. The stream is not as long",
        ),
        (END, {}, "rank 0 is at the end of its last epoch, rank 1 trains step 7.* decide a break"),
        (
            {},
            {"step": Meeting.SUM.step},
            "rank 0 trains step 7, rank 1 is at run.sum. Every rank must make the same calls",
        ),
        (END, {**END, "updates": 1}, "different numbers of updates: rank 0 0 in this run, rank 1 1"),
        ({**END, "skipped": 1}, END, None),
    ],
)
def test_each_way_to_be_apart_has_its_own_cause_and_next_step(
    own: dict[str, int], theirs: dict[str, int], said: str | None
) -> None:
    """Streams of other lengths, a loss that reaches no parameter and a skipped batch were all "out of step"."""
    usual = replace(Proposal.of(batch_slice(7), NOTHING, updates=0), samples=20)
    proposals = [("rank 0", replace(usual, **own)), ("rank 1", replace(usual, **theirs))]
    if said is None:
        assert merged(proposals) == NOTHING
        return
    with pytest.raises(BadInput, match=said):
        merged(proposals)


def test_a_batch_without_a_pass_is_noticed_whether_an_update_was_made_or_not() -> None:
    """1. Both train a batch. 2. Rank 1 has a loss that reaches no parameter and calls optimizer.step(): the ranks meet
    before the next collective, in which rank 0 would wait. 3. Or it skips the batch."""
    for update, said in ((True, "rank 1 called optimizer.step"), (False, "rank 1 skipped a batch")):
        ranks = Ranks(2, at_once=True)
        for agreement in ranks.all:
            agreement.propose(batch_slice(0), NOTHING)
        for agreement in ranks.all:
            agreement.act()
            agreement.updated()
            agreement.batch_over()
        if update:
            ranks.all[1].updated()
        ranks.all[1].batch_over()
        ranks.all[0].propose(batch_slice(1), NOTHING)
        assert ranks.all[1].must_meet == update
        with pytest.raises(BadInput, match=said):
            ranks.all[1].meet(Meeting.UPDATE, NOTHING) if update else ranks.all[1].propose(batch_slice(2), NOTHING)
        with pytest.raises(BadInput, match=said):
            ranks.all[0].act()


def test_what_makes_no_sense_is_refused_with_a_reason() -> None:
    ranks = Ranks(2)
    ranks.all[1].propose(batch_slice(0), Agreed(1, False))
    (_, _, proposal) = ranks.sent[0]
    listener = ranks.exchanges[0]
    assert listener.hear(1, 1, proposal[:-1]) == "malformed"
    assert listener.hear(1, 0, proposal) == "malformed", "nobody else speaks for this rank"
    assert listener.hear(1, 2, proposal) == "malformed", "there is no rank 2"
    assert listener.hear(1 + KEPT_PASSES, 1, proposal) == "step too far ahead"
    assert listener.hear(1, 1, proposal) is None
    assert listener.hear(1, 1, proposal) == "twice"
    ranks.all[0].propose(batch_slice(0), Agreed(1, False))
    ranks.all[0].act()
    assert listener.hear(1, 1, proposal) == "old step"


def test_ranks_that_made_other_updates_are_told_so_by_name() -> None:
    """1. Both make an update of pass 1, rank 0 alone one of pass 2. 2. Both begin pass 3. Their rounds differed by one
    from there on: each part was taken for another update's, until somebody waited at the end."""
    ranks = Ranks(2)
    for number, updating in ((1, ranks.all), (2, ranks.all[:1])):
        for agreement in ranks.all:
            agreement.propose(batch_slice(number - 1), NOTHING)
        ranks.deliver()
        for agreement in ranks.all:
            agreement.act()
        for agreement in updating:
            agreement.updated()
    for agreement in ranks.all:
        agreement.propose(batch_slice(2), NOTHING)
    ranks.deliver()
    for agreement, who in ((ranks.all[0], "rank 0 2 in this run, rank 1 1"), (ranks.all[1], "rank 1 1 .* rank 0 2")):
        with pytest.raises(BadInput, match=who):
            agreement.act()


def test_who_waits_for_an_update_that_another_rank_is_past_is_told_before_its_own_next_pass() -> None:
    """1. Rank 0 made an update of pass 1, and its next forward pass waits for rank 1's part of it. 2. Rank 1 made none:
    it begins pass 2 and waits for rank 0's proposal. Both waited until a deadline of minutes."""
    ranks = Ranks(2)
    for agreement in ranks.all:
        agreement.propose(batch_slice(0), NOTHING)
    ranks.deliver()
    ranks.all[0].updated()
    ranks.exchanges[0].check()
    ranks.all[1].propose(batch_slice(1), NOTHING)
    ranks.deliver()
    with pytest.raises(BadInput, match="rank 0 1 in this run, rank 1 0"):
        ranks.exchanges[0].check()


def test_a_rank_that_is_a_pass_behind_has_not_made_other_updates_yet() -> None:
    ranks = Ranks(2)
    for agreement in ranks.all:
        agreement.propose(batch_slice(0), NOTHING)
    ranks.deliver()
    for number in (1, 2):
        ranks.all[1].updated()
        ranks.all[1].propose(batch_slice(number), NOTHING)
        ranks.deliver()
    ranks.exchanges[0].check()
    ranks.all[0].updated()
    with pytest.raises(BadInput, match="rank 0 2 in this run, rank 1 1"):  # of pass 2, which rank 0 is too late for
        ranks.all[0].updated()


def test_at_the_end_all_confirm_that_they_made_as_many_updates() -> None:
    """1. All made one update and confirm it. 2. Rank 0 alone makes another. 3. It would wait for rank 1's part, which
    is done with training and begins no pass that would tell."""
    ranks = Ranks(2, deadline_s=DEADLINE_S, at_once=True)
    for updating, refusals in ((ranks.all, 0), (ranks.all[:1], 2)):
        for agreement in updating:
            agreement.updated()
        refused: list[str] = []
        confirming = [threading.Thread(target=confirm, args=(agreement, refused)) for agreement in ranks.all]
        for thread in confirming:
            thread.start()
        for thread in confirming:
            thread.join(timeout=DEADLINE_S)
        assert len(refused) == refusals
        assert all("rank 0 2" in text and "rank 1 1" in text for text in refused)


def confirm(agreement: Agreement, refused: list[str]) -> None:
    try:
        agreement.meet(Meeting.END, NOTHING)
    except BadInput as error:
        refused.append(str(error))
