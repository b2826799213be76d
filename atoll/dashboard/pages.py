"""Puts what the page shows into plain JSON: the words of the command line's own tables, and numbers to draw. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from atoll.cli.render import views, wire

if TYPE_CHECKING:
    from atoll.v1.common_pb2 import Event
    from atoll.v1.jobs_pb2 import Job, ListNodesReply, Node, PlansReply

ENDED_SHOWN: Final = 30
"""Jobs that are over, newest first."""


def cluster(jobs: Sequence[Job], nodes: ListNodesReply) -> dict[str, Any]:
    """The first page: jobs, nodes and the map of islands. Living jobs come first, then those that ended last."""
    living = sorted((job for job in jobs if not job.ended_unix_s), key=lambda job: job.submitted_unix_s)
    ended = sorted((job for job in jobs if job.ended_unix_s), key=lambda job: -job.ended_unix_s)[:ENDED_SHOWN]
    now_s = nodes.unix_s
    return {
        "controller": nodes.controller,
        "version": nodes.version,
        "jobs": _table(views.JOB_COLUMNS, [views.job_row(job, now_s) for job in (*living, *ended)]),
        "nodes": _table(views.NODE_COLUMNS, [views.node_row(node) for node in nodes.nodes]),
        "map": islands(living, nodes.nodes),
    }


def job(found: Job, now_s: float) -> dict[str, Any]:
    """One job's page: its head in the words of `atoll status`, its workers, and what may be done to it."""
    return {
        "id": found.id,
        "phase": wire.phase(found),
        "ended": bool(found.ended_unix_s),
        "run": found.run,
        "view": found.view,
        "lines": views.status_lines(found, now_s),
        "trained_share": found.progress.trained_share,
        "pins": views.pins_text(found),
        "workers": _table(views.WORKER_COLUMNS, [views.worker_row(worker) for worker in found.workers]),
        "busy": [_spans(worker.last.compute_s, worker.last.wait_s) for worker in found.workers],
        "batch": found.plan.total_batch,
    }


def _spans(compute_s: float, wait_s: float) -> float:
    """The part of a step that is work, 0..1; 0 where nothing was measured."""
    whole_s = compute_s + wait_s
    return compute_s / whole_s if whole_s > 0 else 0.0


def islands(jobs: Iterable[Job], nodes: Sequence[Node]) -> dict[str, Any]:
    """Islands with their nodes, and the links between them as the workers of living jobs measured them.

    A link's goodput, in bit/s, is the mean of those of its pairs of ranks that were ever busy; 0: idle so far. It is
    relayed where any of these pairs is.
    """
    island_of = {node.name: node.island for node in nodes}
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    sent: dict[tuple[str, str], int] = defaultdict(int)
    relayed: set[tuple[str, str]] = set()
    for found in jobs:
        node_of = {worker.rank: worker.node for worker in found.workers}
        behind_nat = {worker.rank for worker in found.workers if worker.behind_nat}
        for worker in found.workers:
            for link in worker.links:
                ends = (island_of.get(worker.node), island_of.get(node_of.get(link.peer, "")))
                if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
                    continue
                between = (ends[0], ends[1])
                measured[between] += [link.goodput_bps] if link.goodput_bps else []
                sent[between] += link.sent_bytes
                if worker.rank in behind_nat or link.peer in behind_nat:
                    relayed.add(between)
    reasons = {node.island: node.island_reason for node in nodes}
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes:
        members[node.island].append(
            {"name": node.name, "connected": node.connected, "devices": len(node.devices), "busy": bool(node.workers)}
        )
    return {
        "islands": [{"name": name, "nodes": members[name], "reason": reasons[name]} for name in sorted(members)],
        "links": [
            {
                "from": ends[0],
                "to": ends[1],
                "goodput_bps": sum(measured[ends]) / len(measured[ends]) if measured[ends] else 0.0,
                "sent_bytes": sent[ends],
                "relayed": ends in relayed,
            }
            for ends in sorted(sent)
        ],
    }


def plans(reply: PlansReply) -> dict[str, Any]:
    """Return the rows of `atoll plans`, the newest first."""
    return _table(views.PLAN_COLUMNS, views.plan_rows(reply)[::-1])


def event(happened: Event) -> dict[str, Any]:
    """One event: its sequence, level, kind, text and the controller's wall clock."""
    return {
        "sequence": happened.sequence,
        "unix_s": happened.unix_s,
        "level": wire.level(happened),
        "kind": wire.event_kind(happened),
        "text": happened.text,
    }


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    names, numbers = ([name.removeprefix(">") for name in columns], [name[1:] for name in columns if name[:1] == ">"])
    return {"columns": names, "numbers": numbers, "rows": [list(row) for row in rows]}
