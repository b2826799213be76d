"""Recovery of one state on all members of a view: gathers the facts, chooses the policy and carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.agent.runtime.checkpoints.memory.recovery.held_generations import Recovered
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.membership.recovery.adopt_newest import AdoptNewest
from atoll.agent.runtime.membership.recovery.choice import RecoveryFacts, RecoveryPolicy, choose_recovery
from atoll.agent.runtime.membership.recovery.continue_without_rollback import ContinueWithoutRollback
from atoll.agent.runtime.membership.recovery.outcome import RecoveryOutcome
from atoll.agent.runtime.membership.recovery.rewind_stages import RewindStages
from atoll.agent.runtime.membership.recovery.roll_back_to_memory import RollBackToMemory, oldest_useful_step
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import CheckpointError


class StateRecovery:
    """Recovery in the view that the session names. Methods are collective and raise PeerLost."""

    def __init__(
        self, member: MemberState, has_state: Sequence[bool], *, counts: bool, rewind: Callable[[int], bool] | None
    ) -> None:
        """has_state: by rank, whether the member trained in the view before. counts: whether this member has the state
        of a whole update. rewind: as `ExchangeControl` has it."""
        self._member, self._has_state, self._counts, self._rewind = member, has_state, counts, rewind
        self.keeps_rank_state = member.keeper.shutdown.exchange.needs_rollback
        """The strategy of the members keeps state of single ranks; the same on all of them after `recover`."""
        self._generation: Recovered | None = None

    def recover(self, step_s: float, old_world_size: int) -> RecoveryOutcome:
        """Give all members one state. step_s: mean duration of a step. old_world_size: members of the view before.

        Raises BadInput or CheckpointError where this member cannot continue in place."""
        member = self._member
        choice = choose_recovery(self._gather_facts(step_s))
        match choice.policy:
            case RecoveryPolicy.ADOPT_NEWEST:
                return AdoptNewest(member, counts=self._counts).recover()
            case RecoveryPolicy.REWIND_STAGES:
                assert self._rewind is not None  # the model is in stages
                return RewindStages(member, self._rewind, counts=self._counts).recover()
            case RecoveryPolicy.ROLL_BACK_TO_MEMORY:
                assert self._generation is not None  # a fact of the choice
                return RollBackToMemory(member, self._generation).recover()
            case RecoveryPolicy.CONTINUE_WITHOUT_ROLLBACK:
                return ContinueWithoutRollback(member, choice.reason, old_world_size).recover()
            case RecoveryPolicy.RESTART:
                raise CheckpointError(choice.reason)

    def _gather_facts(self, step_s: float) -> RecoveryFacts:
        """Gather what all members must know alike. Memory is read only where a rollback may be needed."""
        member = self._member
        self._compare_rank_state()
        handed_over_at = self._handed_over_at() if self.keeps_rank_state else None
        memory_lacks = ""
        if self.keeps_rank_state and handed_over_at is None:
            saves, step = member.keeper.saver.enabled, member.boundary_step
            since = member.strategy_step
            oldest = oldest_useful_step(member.session.group, step, step_s, since=since, saves=saves)
            try:
                self._generation = member.keeper.newest_in_memory(oldest)
            except CheckpointError as error:
                memory_lacks = str(error)
        return RecoveryFacts(
            keeps_rank_state=self.keeps_rank_state,
            in_stages=self._rewind is not None,
            handed_over_at=handed_over_at,
            memory_step=None if self._generation is None else self._generation.checkpoint.header.step,
            memory_lacks=memory_lacks,
            all_have_state=all(self._has_state),
        )

    def _compare_rank_state(self) -> None:
        """Raise CheckpointError if some members had left for another strategy and others had not. Collective."""
        rows = gathered_rows(self._member.session.group, [int(self.keeps_rank_state)])
        found = {bool(row[0]) for row, has in zip(rows, self._has_state, strict=True) if has}
        if len(found) > 1:
            raise CheckpointError("some workers had begun another strategy when one was lost, and others had not")
        self.keeps_rank_state = found == {True}

    def _handed_over_at(self) -> int | None:
        """Return the step at whose boundary all members with state left the view before and handed over.

        None where they did not, or at different boundaries."""
        handed_over = self._member.handed_over
        step = handed_over.origin.step if handed_over is not None else -1
        rows = gathered_rows(self._member.session.group, [step])
        steps = {row[0] for row, has in zip(rows, self._has_state, strict=True) if has}
        return min(steps) if len(steps) == 1 and min(steps) >= 0 else None
