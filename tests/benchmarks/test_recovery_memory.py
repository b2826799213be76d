"""What a rank takes of memory, and receives, where its run goes on from checkpoints in memory. Real processes."""

from __future__ import annotations

import pytest
from recovery_memory import Case, recovered

STATE_BYTES = 64 << 20
SLACK_BYTES = 6 << 20  # allocators, threads


@pytest.mark.parametrize(("case", "elsewhere"), [(Case(2, 1, 0), 0), (Case(2, 2, 1), STATE_BYTES)])
def test_a_rank_takes_the_state_and_one_shard_and_a_machine_receives_what_it_lacks_once(
    case: Case, elsewhere: float
) -> None:
    """1. All machines come back, or one is new. 2. Every rank received all shards, those of its own machine too, and
    held them beside one row of them beside the tensors: three times the state. 3. Now it maps what lies on its
    machine, what that lacks comes there once, and shard by shard fills the tensors."""
    told = recovered(case, STATE_BYTES)
    shard = STATE_BYTES / (case.machines * case.ranks_each)
    assert max(one["peak_bytes"] for one in told) <= STATE_BYTES + shard + SLACK_BYTES
    assert min(one["peak_bytes"] for one in told) >= 0.9 * STATE_BYTES  # the state itself: it was looked at
    if elsewhere:  # files have a page or two beside the state
        assert sum(one["from_elsewhere"] for one in told) == pytest.approx(elsewhere, rel=0.03)
    else:
        assert sum(one["bytes"] for one in told) == 0
