"""A run as one of its views sees it. Pure.

A run's record has every worker that was ever launched for it, by rank, which is its number for good. What is decided of
speeds, shares and placement is of a view's members, by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.state.records import RunMember, RunRecord
from atoll.controller.state.views import ViewRecord, ViewState


@dataclass(frozen=True, slots=True)
class Seats:
    """A run's places by node, made once for as long as `run` and `view` are what they are. ranks: of all its workers;
    devices: indices of those that they hold; vacant: (node, index) of those that lost ones had, kept for who starts in
    their stead."""

    run: RunRecord
    view: ViewRecord | None
    ranks: Mapping[str, frozenset[int]]
    devices: Mapping[str, frozenset[int]]
    vacant: frozenset[tuple[str, int]]


def seats_of(run: RunRecord, view: ViewRecord | None) -> Seats:
    ranks: dict[str, set[int]] = {}
    for member in run.members:
        ranks.setdefault(member.node, set()).add(member.rank)
    devices: dict[str, set[int]] = {}
    for member in run.members if view is None else living(run.members):
        devices.setdefault(member.node, set()).add(member.device)
    lost = [member for member in members_of(run, view) if member.exit is not None] if view is not None else []
    vacant = {(one.node, one.device) for one in lost if one.device not in devices.get(one.node, ())}
    return Seats(run, view, _frozen(ranks), _frozen(devices), frozenset(vacant))


def living(members: Iterable[RunMember]) -> list[RunMember]:
    return [member for member in members if member.exit is None]


def _frozen(by_node: Mapping[str, set[int]]) -> dict[str, frozenset[int]]:
    return {node: frozenset(numbers) for node, numbers in by_node.items()}


def members_of(run: RunRecord, view: ViewRecord | None) -> tuple[RunMember, ...]:
    """Return the members of the view, by position. view: None if the run has none: all members."""
    if view is None or view.ranks == tuple(range(len(run.members))):
        return run.members
    return tuple(run.members[rank] for rank in view.ranks)


def limited_to(run: RunRecord, view: ViewRecord | None) -> RunRecord:
    """The run as if it had only ever had these members, under their own ranks."""
    members = members_of(run, view)
    return run if members is run.members else replace(run, members=members)


def by_position(run: RunRecord, view: ViewRecord | None) -> RunRecord:
    """The run as if it had begun with the view: ranks are positions, and so are places on nodes."""
    members = members_of(run, view)
    if members is run.members:
        return run
    nodes = list(dict.fromkeys(member.node for member in members))
    sizes, local = Counter(member.node for member in members), Counter[str]()
    numbered = []
    for position, member in enumerate(members):
        numbered.append(
            replace(
                member,
                rank=position,
                node_rank=nodes.index(member.node),
                local_rank=local[member.node],
                local_world_size=sizes[member.node],
            )
        )
        local[member.node] += 1
    return replace(run, members=tuple(numbered))


def with_state(view: ViewRecord) -> tuple[int, ...]:
    """Ranks whose state counts in a later view: all of one in force, whose members have met and agreed."""
    return view.ranks if view.state is ViewState.IN_FORCE else view.has_state


def joiners(run: RunRecord, view: ViewRecord) -> list[RunMember]:
    """Workers of the run that live and are not in its newest view: they join, or have yet to leave."""
    ranks = set(view.ranks)
    return [member for member in run.members if member.exit is None and member.rank not in ranks]


def in_whole_pipelines(run: RunRecord, view: ViewRecord, stages: int) -> frozenset[int]:
    """Ranks of the view's members that live, as do all of their pipeline: it is of no use without one of its stages."""
    alive = [rank if run.members[rank].exit is None else None for rank in view.ranks]
    pipelines = [alive[first : first + stages] for first in range(0, len(alive), stages)]
    return frozenset(rank for each in pipelines if None not in each for rank in each if rank is not None)


def in_order(members: Sequence[RunMember], ports: Mapping[str, Sequence[int]], stages: int = 1) -> list[RunMember]:
    """The members by their seats, so that nodes keep their places; first a node that offers a port, where one does. Of
    pipelines, `members` has one after the other, and they stay whole, with their stages in order."""
    if stages > 1:
        pipelines = [members[first : first + stages] for first in range(0, len(members), stages)]
        pipelines.sort(key=lambda each: not ports.get(each[0].node))
        return [member for each in pipelines for member in each]
    ordered = sorted(members, key=lambda m: (m.node_rank, m.local_rank, m.rank))
    nodes = list(dict.fromkeys(member.node for member in ordered))
    first = next((node for node in nodes if ports.get(node)), None)
    if first is None:
        return ordered
    at = nodes.index(first)
    nodes[0], nodes[at] = first, nodes[0]
    return sorted(ordered, key=lambda member: nodes.index(member.node))


def seat(run: RunRecord, device: FreeDevice, island: str, *, behind_nat: bool = False) -> RunMember:
    """A place, with the next rank, for a worker that joins: on its node beside those that live there, else in the
    stead of a node that is gone, else behind all."""
    node, alive = device.node, living(run.members)
    there = [member for member in alive if member.node == node]
    used: Container[int] = {member.local_rank for member in there}
    if there:
        node_rank = there[0].node_rank
    else:
        taken = {member.node_rank for member in alive}
        own = [member.node_rank for member in run.members if member.node == node and member.node_rank not in taken]
        gone = [member.node_rank for member in run.members if member.node_rank not in taken]
        node_rank = min(own or gone or [1 + max((m.node_rank for m in run.members), default=-1)])
    local_rank = next(i for i in range(len(there) + 1) if i not in used)
    return RunMember(
        rank=len(run.members),
        node=node,
        device=device.index,
        node_rank=node_rank,
        local_rank=local_rank,
        local_world_size=max(local_rank, len(there)) + 1,
        island=island,
        behind_nat=behind_nat,
    )
