"""Run events that an agent causes: a stop, a lost worker, a worker that joins. Each function returns when its event is
over, or when a worker's case has ended before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

from zmq_agent import FakeAgent

from atoll.v1.common_pb2 import (
    VIEW_STAGE_BROKEN,
    VIEW_STAGE_FAILED,
    VIEW_STAGE_READY,
    VIEW_STAGE_TRAINING,
    VIEW_STAGE_UNABLE,
    ViewStage,
)

POLL_S: Final = 0.005
MAX_VIEWS: Final = 5
"""The most views that are tried until one comes about: on a loaded machine a member may be late for a meeting."""


def stop(agent: FakeAgent, connections: list[Connection], arrived: Sequence[Path]) -> None:
    """Stop all workers once each waits for that."""
    _until(lambda: all(one.exists() for one in arrived), connections)
    for rank in range(agent.world_size):
        agent.send_stop(rank)


def stop_broken(agent: FakeAgent, connections: list[Connection]) -> None:
    """Stop the first worker once it reports that it lost the second one."""
    if _until(lambda: agent.stands_at(0)[1] == VIEW_STAGE_BROKEN, connections[:1]):
        agent.send_stop(0)


def takes_help(agent: FakeAgent, connections: list[Connection]) -> bool:
    """Wait until the first worker has said where volunteers may help it. Returns False where it has ended before."""
    return _until(lambda: 0 in agent.volunteers.ports, connections)


def form_without_last(agent: FakeAgent, connections: list[Connection], *, at_boundary: bool) -> None:
    """The last worker has died: let the others train without it, or stop them where one cannot.

    at_boundary: survivors make their step without the lost worker and leave for the view after it."""
    left = range(agent.world_size - 1)
    if not at_boundary and not _until(lambda: _all_at(agent, left, 1, VIEW_STAGE_BROKEN), connections):
        return
    _form(agent, left, (1.0,) * len(left), connections, at_boundary=at_boundary)


def admit(agent: FakeAgent, connections: list[Connection], arrived: Sequence[Path]) -> None:
    """Let all train in a view with the worker that joins, once it is ready and the others wait for that."""
    joiner = agent.world_size
    ranks = range(joiner + 1)
    if not (
        _until(lambda: agent.stands_at(joiner)[1] == VIEW_STAGE_READY, connections)
        and _until(lambda: all(one.exists() for one in arrived), connections)
    ):
        agent.send_stop(joiner)  # the others were refused: it would wait for them
        return
    shares = (2.0,) + (1.0,) * joiner
    _form(agent, ranks, shares, connections, without_state=[joiner], at_boundary=True)


def _form(
    agent: FakeAgent,
    ranks: Sequence[int],
    shares: Sequence[float],
    connections: list[Connection],
    *,
    without_state: Sequence[int] = (),
    at_boundary: bool,
) -> None:
    """Let these train in a view, or stop them where one cannot.

    Where a member reports that the view did not come about, a later one follows, as a controller forms it."""
    for view in range(2, 2 + MAX_VIEWS):
        at_boundary = at_boundary and view == 2
        agent.send_view(view, ranks, shares, plan_id=view, without_state=without_state, at_boundary=at_boundary)
        if not _until(partial(_decided, agent, ranks, view), connections):
            return
        if _all_at(agent, ranks, view, VIEW_STAGE_TRAINING):
            agent.put_in_force()
            return
        if _unable(agent, ranks):
            for rank in ranks:
                agent.send_stop(rank)
            return


def _decided(agent: FakeAgent, ranks: Sequence[int], view: int) -> bool:
    failed = any(agent.stands_at(rank) == (view, VIEW_STAGE_FAILED) for rank in ranks)
    return failed or _unable(agent, ranks) or _all_at(agent, ranks, view, VIEW_STAGE_TRAINING)


def _all_at(agent: FakeAgent, ranks: Iterable[int], view: int, stage: ViewStage.ValueType) -> bool:
    return all(agent.stands_at(rank) == (view, stage) for rank in ranks)


def _unable(agent: FakeAgent, ranks: Iterable[int]) -> bool:
    return any(agent.stands_at(rank)[1] == VIEW_STAGE_UNABLE for rank in ranks)


def _until(condition: Callable[[], bool], connections: list[Connection]) -> bool:
    """Wait for a condition. Returns False where a worker's case ended first."""
    while not condition():
        if wait(connections, timeout=POLL_S):
            return condition()
    return True
