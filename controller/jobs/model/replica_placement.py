"""Places copies of each machine's state on other machines of a run: the input of planner `placement`, and its answer.
Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from humanize import naturalsize

from atoll.controller.planners.checkpoint_placement.failure_domains import Machine
from atoll.controller.planners.checkpoint_placement.placement import GENERATIONS, PlacementInput, PlacementPlan
from atoll.controller.planners.registry import PLACEMENT
from atoll.controller.state.records import JobLearned, NodeRecord, PlacementRecord, RunMember
from atoll.jobs.job_spec import Checkpoint


def first_placement(
    run: int,
    members: Sequence[RunMember],
    nodes: Mapping[str, NodeRecord],
    wanted: Checkpoint,
    *,
    before: PlacementRecord | None = None,
    links: Mapping[str, float] | None = None,
    learned: JobLearned = JobLearned(),  # noqa: B008 - it cannot change
) -> PlacementRecord | None:
    """The placement that a run begins with; None where there is nothing to place.

    members: by rank. nodes: theirs, by name. before: of the run before, of which as little as may be is moved. links:
    by island, bits per second to the others, where that was measured. learned: how large the job's state is, where that
    is known. Raises NoFeasiblePlan where no machine's memory has room for a copy.
    """
    names = list(dict.fromkeys(member.node for member in members))
    replicas = min(wanted.memory_replicas, len(names))
    if replicas < 2:
        return None
    asked: dict[str, Any] = {"site_safe": True} if wanted.site_safe else {}
    if before is not None:
        asked["previous"] = copies_by_node(before)
    machines = _machines(members, nodes, links or {}, learned)
    decision = PLACEMENT.decide(PlacementInput(machines=machines, replicas=replicas, **asked))
    reason = _reason(names, decision.plan)
    return PlacementRecord(run=run, reason=reason, input=decision.input, output=decision.output)


@lru_cache(maxsize=64)
def holders(output: str) -> tuple[tuple[int, ...], ...]:
    """Return by node, in the run's order, the positions with copies of its state. output: the planner's."""
    return tuple(tuple(each[1:]) for each in json.loads(output)["holders"])


def shared_hosts(placement: PlacementRecord) -> tuple[str, ...]:
    """Hosts whose loss alone takes somebody's state out of memory, each named by one of its nodes."""
    found: Mapping[str, Sequence[str]] = json.loads(placement.output).get("fatal_domains") or {}
    return tuple(found.get("host", ()))


def without_room(placement: PlacementRecord) -> Iterator[str]:
    """Yield sentences on replicas that do not fit into their place's memory."""
    machines = json.loads(placement.input)["machines"]
    output = json.loads(placement.output)

    def figures(owner: int, holder: int) -> str:
        takes = GENERATIONS * machines[owner]["checkpoint_bytes"]
        return f"({naturalsize(takes)}); for checkpoints it has {naturalsize(machines[holder]['memory_bytes'])}"

    for machine in output.get("own_without_room") or ():
        name = machines[machine]["name"]
        shown = figures(machine, machine)
        yield f"the memory of {name} has no room for its own checkpoints {shown}: they go to its disk"
    for owner, holder in output.get("without_room") or ():
        shown, instead = figures(owner, holder), len(output["holders"][owner]) > 1
        whose = f"a copy of {machines[owner]['name']}'s checkpoints {shown}"
        where = "it lies elsewhere" if instead else "there is none"
        yield f"the memory of {machines[holder]['name']} has no room for {whose}: {where}"


def is_same(placement: PlacementRecord, other: PlacementRecord) -> bool:
    """Return True if the same machines hold the same copies."""
    return copies_by_node(placement) == copies_by_node(other)


def _machines(
    members: Sequence[RunMember], nodes: Mapping[str, NodeRecord], links: Mapping[str, float], learned: JobLearned
) -> tuple[Machine, ...]:
    """A domain is named inside the one around it: users reuse names, and agents on one host may stand for islands."""
    first: dict[tuple[str, str, str], str] = {}
    found = []
    of_rank = -(-learned.shared_bytes // len(members)) + learned.own_bytes
    for name, ranks in Counter(member.node for member in members).items():
        node = nodes[name]
        machine: dict[str, Any] = {"name": name, "island": node.island}
        if node.rack:
            machine["rack"] = f"{node.island}/{node.rack}"
        if node.host:
            machine["host"] = first.setdefault((node.island, node.rack, node.host), name)
        if node.island in links:
            machine["link_bps"] = float(f"{links[node.island]:.2g}")  # coarse: it swings
        if of_rank:
            machine["checkpoint_bytes"] = ranks * of_rank
            if node.checkpoint_memory_bytes:
                machine["memory_bytes"] = node.checkpoint_memory_bytes
        found.append(Machine.of_measured(**machine))
    return tuple(found)


def copies_by_node(placement: PlacementRecord) -> dict[str, tuple[str, ...]]:
    """Return by node the nodes with copies of its state, itself first."""
    names = [machine["name"] for machine in json.loads(placement.input)["machines"]]
    return {
        name: tuple(names[i] for i in each)
        for name, each in zip(names, json.loads(placement.output)["holders"], strict=True)
    }


def _reason(names: Sequence[str], plan: PlacementPlan) -> str:
    blocks = [" + ".join(names[i] for i in block) for block in plan.groups[:8]]
    more = len(plan.groups) - len(blocks)
    text = f"state is copied between {', '.join(blocks)}" + (f" and within {more} more groups" if more else "")
    return f"{text}; {plan.moved} moved" if plan.moved else text
