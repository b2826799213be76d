"""Choice of the recovery policy with which the members of a new view continue. Pure.

All members know the same facts, so all choose alike without another message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class RecoveryPolicy(Enum):
    """A policy, and the class that carries it out."""

    ADOPT_NEWEST = "AdoptNewest"
    REWIND_STAGES = "RewindStages"
    ROLL_BACK_TO_MEMORY = "RollBackToMemory"
    CONTINUE_WITHOUT_ROLLBACK = "ContinueWithoutRollback"
    RESTART = "none: the run cannot continue in place"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFacts:
    """Facts that the members of a view have gathered; the same on each of them."""

    keeps_rank_state: bool
    """The strategy keeps state of single ranks, such as residuals. A lost rank takes its own along."""
    in_stages: bool
    """The model is cut into stages: each rank has a part of the state that perhaps no other rank has."""
    handed_over_at: int | None = None
    """The step at whose boundary all members with state left the view before and handed over; None if they did not."""
    memory_step: int | None = None
    """The step of the generation in the members' memory that is recent enough; None if there is none."""
    memory_lacks: str = ""
    """The reason why there is no such generation."""
    all_have_state: bool = True
    """No member joins the run with this view."""


class RecoveryChoice(NamedTuple):
    """A policy, and why it was chosen."""

    policy: RecoveryPolicy
    reason: str


def choose_recovery(facts: RecoveryFacts) -> RecoveryChoice:
    """Choose the policy that loses least. The reason is a sentence for people."""
    if facts.keeps_rank_state and facts.handed_over_at is None:
        if facts.memory_step is not None:
            reason = f"what the lost worker kept for itself is in memory, of step {facts.memory_step}"
            return RecoveryChoice(RecoveryPolicy.ROLL_BACK_TO_MEMORY, reason)
        if facts.all_have_state:
            return RecoveryChoice(RecoveryPolicy.CONTINUE_WITHOUT_ROLLBACK, facts.memory_lacks)
        return RecoveryChoice(RecoveryPolicy.RESTART, facts.memory_lacks)
    if facts.in_stages:
        reason = "each rank has a stage of its own: all continue from the oldest step that a stage stands at"
        return RecoveryChoice(RecoveryPolicy.REWIND_STAGES, reason)
    if facts.keeps_rank_state:
        reason = f"all members left at the boundary of step {facts.handed_over_at} and handed over what each had"
        return RecoveryChoice(RecoveryPolicy.ADOPT_NEWEST, reason)
    return RecoveryChoice(RecoveryPolicy.ADOPT_NEWEST, "a lost worker takes no state along: ranks are replicas")
