"""Recovery of replicas: every member adopts the newest whole state that a member has.

Ranks may be one update apart, and no more: an update needs every rank's part of the gradient, and a rank that is ahead
by one waits for the others' next part. A rank that has made the last update therefore has the state of all. A rank that
lacks it lost its part of that step, and receives the state."""

from __future__ import annotations

from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.checkpoints.disk.transfer import transfer_checkpoint
from atoll.agent.runtime.membership.member_positions import gather_positions, newest_rank
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.membership.recovery.outcome import RecoveryOutcome
from atoll.agent.runtime.model.model_state import module_state
from atoll.errors import BadInput
from atoll.v1.common_pb2 import LEVEL_INFO


class AdoptNewest:
    """Collective, of all members of the view that the session names."""

    def __init__(self, member: MemberState, *, counts: bool) -> None:
        """counts: whether this member has the state of a whole update of the run."""
        self._member, self._counts = member, counts

    def recover(self) -> RecoveryOutcome:
        """Raises PeerLost, CheckpointError, and BadInput where no member has the state of a whole step."""
        member, group = self._member, self._member.session.group
        own, saver = member.position, member.keeper.saver
        rows = gather_positions(group, own, saver.seen_step, counts=self._counts)
        source = newest_rank(rows)
        if source is None:
            raise BadInput("no member has the state of a whole step; it is in a checkpoint")
        behind = [rank for rank, row in enumerate(rows) if not row.counts or row.step < rows[source].step]
        member.put_back()
        saver.seen_step = max(row.seen_step for row in rows if row.counts)  # so that checkpoints are due on all alike
        if not behind:
            return RecoveryOutcome(own)
        assert group is not None  # or it were behind itself
        here = group.rank
        known, _ = pack_state({"model": module_state(member.prepared.model)}) if here in behind else ({}, None)
        brief = member.handed_over is not None and member.handed_over.own_moments
        loaded = saver.loaded(brief_moments=brief) if here == source else None
        sent = transfer_checkpoint(group, loaded, source, behind, known)
        if sent is None:
            return RecoveryOutcome(own)
        position = rows[source].position
        member.session.notice(LEVEL_INFO, f"rank {here} takes the state of step {position.step} from rank {source}")
        member.adopt(sent)
        return RecoveryOutcome(position)
