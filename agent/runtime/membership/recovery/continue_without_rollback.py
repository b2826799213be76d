"""Recovery without rollback: after a loss, members continue with what each of them has.

Used where the lost rank's own state is in no memory, or only in a copy so old that a rollback would lose more. The
shared parameters become those of the most advanced member; of the other members' only differences travel. Each member
keeps its weights, its moments and its unsent updates, relative to those parameters. The lost rank's unsent updates and
the sums that it aggregated are lost. A member that is behind the most advanced one skips the steps between: its samples
of them are not trained. Members may be `staleness` + 1 steps apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.disk.transfer import transfer_checkpoint
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.membership.member_positions import MemberPosition, gather_positions, newest_rank
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.membership.recovery.outcome import RecoveryOutcome
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.model.model_state import plain_parameters
from atoll.agent.runtime.model.snapshot import SHARED
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import LEVEL_WARNING

_OF_OLD_MEMBERS_ONLY = "telling"
"""An entry of the shared state: sums under way, which have the lost rank's part or lack it."""


class ContinueWithoutRollback:
    """Collective, of members that all have state."""

    def __init__(self, member: MemberState, reason: str, old_world_size: int) -> None:
        """reason: why there is no rollback. old_world_size: members of the view before."""
        self._member, self._reason, self._old_world_size = member, reason, old_world_size

    def recover(self) -> RecoveryOutcome:
        """Raises PeerLost, and CheckpointError with the reason where a member's own state is of no use to others."""
        member = self._member
        session, keeper = member.session, member.keeper
        if member.updated_to is None:
            member.put_back()
        survivor, saver, group = keeper.stands_broken(member.updated_to), keeper.saver, session.group
        own = keeper.snapshot.position
        counts = survivor is not None and own is not None
        rows = gather_positions(group, own or Position(0, 0, 0), saver.seen_step, counts=counts)
        source = newest_rank(rows)
        views = {view for (view,) in gathered_rows(group, [keeper.begun_view])}
        if source is None or survivor is None or not all(row.counts for row in rows) or len(views) > 1:
            raise CheckpointError(self._reason)  # relative to another view's parameters own state says nothing
        states = self._states_of(source, len(rows))
        for name, one in member.prepared.tracked.items():
            if f"tracked.{name}" in states:
                one.load_state_dict(states[f"tracked.{name}"])
        position = rows[source].position
        self._warn(rows, position)
        saver.seen_step = max(row.seen_step for row in rows)
        beside = {name: one for name, one in states[SHARED].items() if name != _OF_OLD_MEMBERS_ONLY}
        shared = {**beside, **self._shared_params(states["model"])}
        own_state = survivor.relative_to(shared)
        origin = Origin(session.run, session.view, position.step, self._old_world_size, shared, [own_state])
        member.set_boundary(position)
        if session.place.is_main:
            text = f"{self._reason}: the others go on from step {position.step} as they are, without it"
            session.notice(LEVEL_WARNING, text)
        return RecoveryOutcome(position, origin=origin)

    def _states_of(self, source: int, members: int) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Return the states of rank `source` without its moments, on every member."""
        group = self._member.session.group
        loaded = self._member.keeper.saver.loaded_without_moments()
        if group is not None:
            others = [rank for rank in range(members) if rank != source]
            is_source = group.rank == source
            known = {} if is_source else loaded.tensors
            loaded = transfer_checkpoint(group, loaded if is_source else None, source, others, known) or loaded
        return unpack_state(loaded.tensors, loaded.scalars)

    def _warn(self, rows: list[MemberPosition], position: Position) -> None:
        skipped = sum(position.step - row.step for row in rows)
        if skipped and self._member.session.place.is_main:
            text = f"survivors were behind the furthest one: their samples of {skipped} steps are not trained"
            self._member.session.notice(LEVEL_WARNING, text)

    def _shared_params(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the shared parameters: flat float32 tensors, each in its parameter's order in memory."""
        found: dict[str, torch.Tensor] = {}
        kept = self._member.keeper.shutdown.exchange.durable.shared_params()
        for name, parameter in plain_parameters(self._member.prepared.model):
            if id(parameter) in kept:
                found[f"shared_param.{name}"] = flat = torch.empty(parameter.numel())
                flat.as_strided(parameter.shape, parameter.stride()).copy_(values[name])
        return found
