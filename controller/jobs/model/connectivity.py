"""Finds the devices that can train one job together, where some cannot be dialled from other islands. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.jobs.model.start import FreeDevice
from atoll.controller.state.records import NodeRecord, RunMember, RunRecord
from atoll.controller.state.views import ViewCause, ViewState
from atoll.strategies import registry


@dataclass(frozen=True, slots=True)
class WithinReach:
    devices: Sequence[FreeDevice]
    why: str = ""
    """What was left out; empty where nothing was."""


def within_reach(
    strategy: str, free: Sequence[FreeDevice], records: Callable[[], Mapping[str, NodeRecord]], seats: Iterable[str]
) -> WithinReach:
    """Return the devices of `free` that can train together by this strategy, also with the nodes `seats` of its run.

    If the strategy uses no relay, these are all that can be dialled, or all of one island, whichever are more. records:
    of the connected nodes, by name."""
    known = registry.find(strategy)
    if known.relayed or not free:
        return WithinReach(free)
    nodes = records()
    behind = {device.node for device in free if device.node in nodes and nodes[device.node].behind_nat}
    behind |= {node for node in seats if node in nodes and nodes[node].behind_nat}
    if not behind:
        return WithinReach(free)
    if seated := [nodes[node] for node in seats if node in nodes]:
        return WithinReach([d for d in free if all(_dialled(nodes.get(d.node), seat) for seat in seated)])
    islands = sorted({nodes[device.node].island for device in free if device.node in nodes})
    together = [[device for device in free if device.node not in behind]]
    together += [[d for d in free if d.node in nodes and nodes[d.node].island == island] for island in islands]
    best = max(together, key=len)
    left = sorted({device.node for device in free} - {device.node for device in best})
    if not left:
        return WithinReach(best)
    through = ", ".join(name for name, each in registry.strategies().items() if each.relayed)
    names = ", ".join(left[:8])
    return WithinReach(
        best,
        f"strategy {known.name} goes through no relay, so {names} behind NAT cannot take part with others: submit with "
        f"--strategy {through.replace(', ', ' or ')}, or put the machines of one site into one island",
    )


def with_measured_islands(observed: ObservedJob, run: RunRecord) -> RunRecord:
    """Return the run with the islands in which its nodes are now, if its strategy knows no islands.

    So a strategy that is chosen because a link became thin finds the islands on both sides of that link. Under a
    strategy that exchanges between islands, each island is one replica, and stays it."""
    newest = observed.views.newest
    changing = newest is not None and newest.state is not ViewState.IN_FORCE and newest.cause is not ViewCause.LAUNCH
    if changing or registry.find(observed.strategy).exchanges:
        return run
    nodes = {name: node.record for name, node in observed.nodes.items() if node.record.island_reason}
    moved = [m for m in run.members if m.node in nodes and nodes[m.node].island != m.island]
    if not moved or any(member.behind_nat for member in run.members):  # the relay joins islands as launched
        return run
    ranks = {member.rank for member in moved}
    members = [replace(m, island=nodes[m.node].island) if m.rank in ranks else m for m in run.members]
    return replace(run, members=tuple(members))


def _dialled(one: NodeRecord | None, other: NodeRecord) -> bool:
    return one is not None and (one.island == other.island or not (one.behind_nat or other.behind_nat))


def relay_notice(members: Sequence[RunMember]) -> str:
    """Return the notice on the links of a run that go through the relay, and their cost; empty if none does."""
    islands = {member.island for member in members}
    behind = sorted({member.node for member in members if member.behind_nat})
    if not behind or len(islands) < 2:
        return ""
    return (
        f"links between islands to and from {', '.join(behind[:16])} (behind NAT) go through the relay: its distance "
        "is added to each round trip, and all of them share its bandwidth"
    )
