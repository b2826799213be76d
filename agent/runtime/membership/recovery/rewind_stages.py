"""Recovery of a model in stages: all stages of all members continue from one step.

Where a member of the old view has not completed the last step, that step is trained again, because no other rank may
have a stage's later state."""

from __future__ import annotations

from collections.abc import Callable

from atoll.agent.runtime.membership.member_positions import gather_positions
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.membership.recovery.outcome import RecoveryOutcome
from atoll.errors import BadInput


class RewindStages:
    """Collective, of all members of the view that the session names."""

    def __init__(self, member: MemberState, rewind: Callable[[int], bool], *, counts: bool) -> None:
        """rewind: undo the stage's updates after this step; False where the stage cannot. counts: whether this member
        has the state of a whole update."""
        self._member, self._rewind, self._counts = member, rewind, counts

    def recover(self) -> RecoveryOutcome:
        """Raises PeerLost, and BadInput where a member has no whole state or cannot rewind so far."""
        member = self._member
        own, saver = member.position, member.keeper.saver
        rows = gather_positions(member.session.group, own, saver.seen_step, counts=self._counts)
        if not all(row.counts for row in rows):
            raise BadInput("a stage has not the state of a whole step; it is in a checkpoint")
        position = min(rows, key=lambda row: row.step).position
        step = position.step
        member.put_back()
        if own.step > step:
            if member.prepared.tracked or not self._rewind(step):
                raise BadInput(f"another stage stands at step {step}, and this one at {own.step} cannot go back there")
            member.set_boundary(position)
        saver.seen_step = min(max(row.seen_step for row in rows), step)
        return RecoveryOutcome(position)
