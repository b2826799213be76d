"""State that a rank takes from one view into the next."""

from __future__ import annotations

import torch

from atoll.agent.runtime.model.durable import Handover, Origin, OwnState


def test_takers_of_a_flushed_handover_together_have_all_that_was_unsent() -> None:
    unsent = {"layer": torch.tensor([3.0, -6.0, 0.5])}
    handover = Handover(Origin(1, 2, 30, 4, {"updates": torch.tensor(30)}), unsent)
    origins = [handover.for_rank(rank, 2) for rank in range(2)]
    owns = [origin.own for origin in origins]
    assert [own is not None and own[0].rank for own in owns] == [0, 1]
    together = sum(own[0].residual["layer"] for own in owns if own is not None)
    assert torch.equal(torch.as_tensor(together), unsent["layer"])
    assert all(origin.shared == handover.origin.shared for origin in origins)


def test_a_handover_without_a_flush_keeps_own_state_at_the_new_rank() -> None:
    """1. Rank 3 leaves with its own residual and sum. 2. In the next view it is rank 2, and still has all of it."""
    own = OwnState(3, {"layer": torch.tensor([1.0])}, None, {"layer": torch.tensor([2.0])})
    handover = Handover(Origin(1, 2, 30, 4, {}, [own]), {})
    assert handover.for_rank(2, 5).own == [OwnState(2, own.residual, None, own.aggregator_sums)]
