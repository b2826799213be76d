"""Recovery by rollback: all members return to a generation that is complete in their memory.

The generation has what each rank kept for itself, also that of the lost rank. The steps after it are trained again."""

from __future__ import annotations

import math
from typing import Final

from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.checkpoints.restore import position_of
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.membership.recovery.outcome import RecoveryOutcome
from atoll.agent.runtime.transport.process_groups import Group, gathered_rows

MAX_RETRAINED_S: Final = 60.0
"""The most training, in seconds, that a rollback may repeat. Over thin links the newest copy is often older; then the
members continue without it, or the run restarts from its last step, without what the lost rank had not sent."""


def oldest_useful_step(group: Group | None, step: int, step_s: float, *, since: int, saves: bool) -> int:
    """Return the oldest step worth a rollback, the same on all members. Collective; raises PeerLost.

    step: at which this member stands. step_s: mean duration of its steps, 0 if unknown. since: the step with which its
    strategy began. saves: the run writes checkpoints; without any, every rollback beats a restart."""
    most_steps = math.ceil(MAX_RETRAINED_S / step_s) if saves and step_s > 0 else step
    rows = gathered_rows(group, [step, most_steps, since])
    newest = max(step for step, _, _ in rows)
    return max(0, newest - max(most for _, most, _ in rows), *(since for _, _, since in rows))


class RollBackToMemory:
    """Collective, of all members of the view that the session names."""

    def __init__(self, member: MemberState, generation: Recovered) -> None:
        self._member, self._generation = member, generation

    def recover(self) -> RecoveryOutcome:
        """Raises PeerLost."""
        self._member.put_back()
        saver = self._member.keeper.saver
        seen = gathered_rows(self._member.session.group, [saver.seen_step])
        saver.seen_step = max(step for (step,) in seen)  # later checkpoints on disk stay
        return RecoveryOutcome(position_of(self._generation.checkpoint.header), generation=self._generation)
