"""After a loss, under a strategy whose ranks keep something for themselves: the members go on with what each of them
has, where what the lost one had is in nobody's memory, or in copies so old that more was lost by going back to them.

Masters are those of whoever has come furthest; of the others' only what differs travels. Each keeps its weights, its
moments and what it has not sent, as of those masters. What the lost one had not sent, and what it summed as an owner,
is lost with it. A rank that is behind the furthest skips what is left of the steps between: its samples of them are
not trained. Ranks may be as many steps apart as others' updates may be late, and one more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.handing_over import hand_over
from atoll.agent.runtime.checkpoints.model_state import plain_parameters
from atoll.agent.runtime.checkpoints.snapshot import SHARED, Tracked
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.membership.standpoints import newest, standpoints
from atoll.agent.runtime.step.state.durable import Origin
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.v1.common_pb2 import LEVEL_WARNING

_OF_THE_OLD_MEMBERS = "telling"  # sums under way have the lost one's part, or lack it


def go_on_as_they_are(
    session: Session,
    model: nn.Module,
    tracked: Mapping[str, Tracked],
    state: StateKeeper,
    *,
    updated_to: Position | None,
    old_world_size: int,
) -> tuple[Position, Origin] | None:
    """Collective, of members who all have state: where they go on and what this one has beside model and optimizer.
    None, on all, where one cannot. updated_to: where the update that came before the loss leads, if one did. Raises
    PeerLost, CheckpointError."""
    survived, saver, group = state.stands_broken(updated_to), state.saver, session.group
    own = state.snapshot.position
    counts = survived is not None and own is not None
    rows = standpoints(group, own or Position(0, 0, 0), saver.seen_step, counts=counts)
    source = newest(rows)
    views = {view for (view,) in gathered_rows(group, [state.begun_view])}
    if source is None or survived is None or not all(row.counts for row in rows) or len(views) > 1:
        return None  # of another view a rank's own says nothing
    loaded = saver.loaded_without_moments()
    if group is not None:
        others = [rank for rank in range(len(rows)) if rank != source]
        is_source = group.rank == source
        known = {} if is_source else loaded.tensors
        loaded = hand_over(group, loaded if is_source else None, source, others, known) or loaded
    states = unpack_state(loaded.tensors, loaded.scalars)
    for name, one in tracked.items():
        if f"tracked.{name}" in states:
            one.load_state_dict(states[f"tracked.{name}"])
    position = rows[source].position
    skipped = sum(position.step - row.step for row in rows)
    if skipped and session.place.is_main:
        text = f"survivors were behind the furthest one: their samples of {skipped} steps are not trained"
        session.notice(LEVEL_WARNING, text)
    saver.seen_step = max(row.seen_step for row in rows)
    beside = {name: one for name, one in states[SHARED].items() if name != _OF_THE_OLD_MEMBERS}
    shared = {**beside, **_masters(model, state, states["model"])}
    return position, Origin(session.run, session.view, position.step, old_world_size, shared, [survived(shared)])


def _masters(model: nn.Module, state: StateKeeper, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flat, float32, each in its parameter's order in memory."""
    found: dict[str, torch.Tensor] = {}
    kept = state.shutdown.exchange.durable.masters()
    for name, parameter in plain_parameters(model):
        if id(parameter) in kept:
            found[f"master.{name}"] = flat = torch.empty(parameter.numel())
            flat.as_strided(parameter.shape, parameter.stride()).copy_(values[name])
    return found
