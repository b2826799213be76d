"""Choice of the recovery policy, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from atoll.agent.runtime.membership.recovery.choice import RecoveryFacts, RecoveryPolicy, choose_recovery

REPLICAS: Final = RecoveryFacts(keeps_rank_state=False, in_stages=False)
STAGES: Final = replace(REPLICAS, in_stages=True)
RESIDUALS: Final = replace(REPLICAS, keeps_rank_state=True, memory_lacks="no copy was whole yet")


@pytest.mark.parametrize(
    ("facts", "policy", "reason"),
    [
        (REPLICAS, RecoveryPolicy.ADOPT_NEWEST, "ranks are replicas"),
        (replace(REPLICAS, all_have_state=False), RecoveryPolicy.ADOPT_NEWEST, "ranks are replicas"),
        (replace(REPLICAS, memory_step=7), RecoveryPolicy.ADOPT_NEWEST, "ranks are replicas"),
        (STAGES, RecoveryPolicy.REWIND_STAGES, "a stage of its own"),
        (replace(RESIDUALS, handed_over_at=30), RecoveryPolicy.ADOPT_NEWEST, "boundary of step 30"),
        (replace(RESIDUALS, handed_over_at=0), RecoveryPolicy.ADOPT_NEWEST, "boundary of step 0"),
        (replace(RESIDUALS, handed_over_at=30, in_stages=True), RecoveryPolicy.REWIND_STAGES, "a stage of its own"),
        (replace(RESIDUALS, handed_over_at=30, memory_step=29), RecoveryPolicy.ADOPT_NEWEST, "boundary of step 30"),
        (replace(RESIDUALS, memory_step=29), RecoveryPolicy.ROLL_BACK_TO_MEMORY, "in memory, of step 29"),
        (replace(RESIDUALS, memory_step=0), RecoveryPolicy.ROLL_BACK_TO_MEMORY, "in memory, of step 0"),
        (
            replace(RESIDUALS, memory_step=29, all_have_state=False),
            RecoveryPolicy.ROLL_BACK_TO_MEMORY,
            "in memory, of step 29",
        ),
        (RESIDUALS, RecoveryPolicy.CONTINUE_WITHOUT_ROLLBACK, "no copy was whole yet"),
        (replace(RESIDUALS, all_have_state=False), RecoveryPolicy.RESTART, "no copy was whole yet"),
    ],
)
def test_the_policy_that_loses_least_is_chosen_and_says_why(
    facts: RecoveryFacts, policy: RecoveryPolicy, reason: str
) -> None:
    choice = choose_recovery(facts)
    assert choice.policy is policy
    assert reason in choice.reason
