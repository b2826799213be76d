"""Has a job's next run wait for machines that are away and that alone hold its newest state in memory. Pure."""

from __future__ import annotations

from typing import Final

from atoll.controller.jobs.model.observed import ObservedJob, PassClock
from atoll.controller.jobs.model.replica_placement import copies_by_node
from atoll.controller.state.records import RunRecord
from atoll.controller.state.recovery import RecoveryRecord

MOST_S: Final = 30.0
_FEWEST_S: Final = 0.5
"""Less is not worth a sentence."""


def awaited_memory(observed: ObservedJob, last_run: RunRecord | None, clock: PassClock) -> str:
    """What the job waits for, empty where it waits for no machine's memory.

    An agent that comes back serves what its machine's memory held before. Without it the run goes on from the disk:
    it is waited for as long as training those steps again would take, MOST_S at most. So the wait at most doubles what
    the loss costs.
    """
    if last_run is None or last_run.recovery is None or last_run.recovery.over:
        return ""
    at_stake = observed.training.memory_step - observed.job.status.checkpoint_step
    left_s = min(_redo_s(last_run, last_run.recovery, at_stake), MOST_S) - (clock.now_s - observed.since_s)
    if left_s < _FEWEST_S or not (away := _hold_alone(observed, last_run)):
        return ""
    who = ", ".join(away[:8])
    return (
        f"waiting {left_s:.0f} s for {who} to come back, whose memory alone has a part of step "
        f"{observed.training.memory_step}; else {at_stake} steps are trained again"
    )


def _redo_s(run: RunRecord, recovery: RecoveryRecord, steps: int) -> float:
    """How long the run took for so many steps, its start included."""
    done = max(recovery.reached_step - recovery.began_step, 1)
    return max(recovery.seen_unix_s - run.began_unix_s, 0.0) * min(max(steps, 0) / done, 1.0)


def _hold_alone(observed: ObservedJob, last_run: RunRecord) -> list[str]:
    """The nodes of the last run that are away, where nobody who is there holds what they held."""
    placement = observed.plans.placement
    copies = copies_by_node(placement) if placement is not None and placement.run == last_run.run else {}
    connected = {name: node for name, node in observed.nodes.items() if node.connected}
    here = {name for name, node in connected.items() if observed.job.id in node.memory_jobs}
    owners = dict.fromkeys(member.node for member in last_run.members)
    return [node for node in owners if node not in connected and here.isdisjoint(copies.get(node, (node,)))]
