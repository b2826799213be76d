"""Orders to nodes, given for as long as what is observed of a run is not what is wanted. Pure.

Nothing remembers what was sent: an order that was lost is given again on the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atoll.controller.jobs.lifecycle.observed import (
    Action,
    ForgetWorker,
    LaunchWorker,
    ObservedJob,
    ObservedWorker,
    SendPlan,
    StopRun,
    WorkerPhase,
)
from atoll.controller.state.records import RunMember, RunRecord
from atoll.worker_key import WorkerKey


def workers_of(observed: ObservedJob, run: RunRecord) -> dict[int, ObservedWorker]:
    """The run's workers by rank, from the nodes they belong on and that are there."""
    found = {}
    for member in run.members:
        node = observed.nodes.get(member.node)
        worker = node.workers.get(WorkerKey(run.job, run.run, member.rank)) if node and node.connected else None
        if worker is not None:
            found[member.rank] = worker
    return found


def launches(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    workers = workers_of(observed, run)
    for member in run.members:
        if not member.exit and member.rank not in workers and _connected(observed, member.node):
            yield LaunchWorker(member.node, WorkerKey(run.job, run.run, member.rank))


def plans(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    """Plans after the first, which came with the launch: all that a node's present stream has not carried, in order.

    An agent hands plans to workers that it has started; what came while it still fetches their code would be lost."""
    workers = workers_of(observed, run)
    living = [m for m in run.members if not m.exit]
    fetching = {m.node for m in living if m.rank not in workers or workers[m.rank].phase is WorkerPhase.STARTING}
    for node in _nodes(observed, (m for m in living if m.node not in fetching)):
        newest = observed.plans.sent.get(node, 1)
        yield from (SendPlan(node, run.job, run.run, plan.id) for plan in observed.plans.issued if plan.id > newest)


def stops(observed: ObservedJob, run: RunRecord) -> Iterator[Action]:
    for node in _nodes(observed, (m for m in run.members if not m.exit)):
        yield StopRun(node, run.job, run.run, run.grace_s, run.why)


def forgets(observed: ObservedJob) -> Iterator[Action]:
    """Ends that are in etcd need not be reported any more: of `observed.run`, not of what this pass will write."""
    for member in observed.run.members if observed.run else ():
        key = WorkerKey(observed.job.id, observed.run.run if observed.run else 0, member.rank)
        node = observed.nodes.get(member.node)
        if member.exit and node and node.connected and key in node.workers:
            if node.workers[key].phase is WorkerPhase.EXITED:
                yield ForgetWorker(member.node, key)
            else:  # it counted as lost and is there again: an older run by now
                yield StopRun(member.node, key.job, key.run, 0.0, "it counted as lost")


def _nodes(observed: ObservedJob, members: Iterable[RunMember]) -> Iterator[str]:
    yield from sorted({m.node for m in members if _connected(observed, m.node)})


def _connected(observed: ObservedJob, name: str) -> bool:
    node = observed.nodes.get(name)
    return node is not None and node.connected
