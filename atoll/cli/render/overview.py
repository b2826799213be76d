"""The whole cluster on one screen: jobs above, nodes below, as many of each as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from atoll.cli.render import terminal, views, wire

if TYPE_CHECKING:
    from atoll.v1.jobs_pb2 import Job, ListNodesReply

NODE_COLUMNS: Final = ("NODE", "ISLAND", "STATE", "LOAD", "MEMORY", "WORKERS", "DEVICES")
_OVER: Final = ("done", "failed", "cancelled")
_AROUND: Final = 7
"""Lines that are neither a job nor a node: the head, two heads of tables with their rules, what separates them."""
_ENDED_SHOWN: Final = 5


class Overview:
    """Snapshot to show."""

    def __init__(self, jobs: Sequence[Job], nodes: ListNodesReply, now_s: float) -> None:
        self.seen_unix_s = now_s
        living = [job for job in jobs if wire.phase(job) not in _OVER]
        ended = sorted((job for job in jobs if wire.phase(job) in _OVER), key=lambda job: -job.ended_unix_s)
        self.jobs = [views.job_row(job, now_s, brief=True) for job in [*living, *ended[:_ENDED_SHOWN]]]
        self.nodes = [
            (node.name, node.island, state, views.load_text(node) or "-", memory, running, devices)
            for node in nodes.nodes
            for _, _, state, _, devices, _, memory, running, _ in [views.node_row(node)]
        ]
        connected = sum(node.connected for node in nodes.nodes)
        devices = sum(len(node.devices) for node in nodes.nodes if node.connected)
        self.head = (
            f"{nodes.controller}   {len(living)} of {len(jobs)} jobs live   "
            f"{connected} of {len(nodes.nodes)} nodes connected, {devices} devices"
        )

    def lines(self) -> list[str]:
        """All of it as plain text."""
        jobs = terminal.aligned(views.JOB_COLUMNS, self.jobs)
        return [self.head, "", *jobs, "", *terminal.aligned(NODE_COLUMNS, self.nodes)]

    def rich(self, height: int) -> list[Any]:
        """Render for a terminal with so many lines."""
        from rich.text import Text

        room = max(2, height - _AROUND)
        nodes = min(len(self.nodes), max(room // 2, room - len(self.jobs)))
        jobs = min(len(self.jobs), room - nodes)
        return [
            Text(self.head, "dim"),
            Text(),
            *_table(views.JOB_COLUMNS, self.jobs, jobs, "atoll jobs"),
            Text(),
            *_table(NODE_COLUMNS, self.nodes, nodes, "atoll nodes"),
        ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], shown: int, all_of_it: str) -> list[Any]:
    from rich.text import Text

    if len(rows) > shown:  # the last line says so
        more = Text(f"and {len(rows) - shown + 1} more: {all_of_it}", "dim")
        return [terminal.rich_table(columns, rows[: shown - 1], one_line=True), more]
    return [terminal.rich_table(columns, rows, one_line=True)]
