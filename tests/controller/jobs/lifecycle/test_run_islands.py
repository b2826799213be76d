"""The islands of a run that trains, where its nodes are in other ones by now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import clock, job, node, observed, run, spec, worker

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.connectivity import with_measured_islands
from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.state.records import RunRecord


def moved(strategy: str = "dense", *, named: str = "", behind_nat: bool = False) -> tuple[ObservedJob, RunRecord]:
    """A run on a and b, launched as one island; the link between both became thin since."""
    begun = run("a", "b")
    members = (replace(one, island="lan-1", behind_nat=behind_nat) for one in begun.members)
    begun = replace(begun, members=tuple(members))
    a, b = (node(name, {rank: worker()}) for rank, name in enumerate("ab"))
    a = replace(a, record=replace(a.record, island="lan-1", island_reason="fast"))
    away = replace(b.record, island=named or "lan-2", named_island=named, island_reason="thin")
    return observed(job(spec=spec(strategy=strategy)), begun, a, replace(b, record=away)), begun


def test_a_run_of_dense_takes_them_over_so_that_another_strategy_finds_them() -> None:
    seen, _ = moved()
    step = next_step(seen, clock())
    assert step.run is not None
    assert [member.island for member in step.run.members] == ["lan-1", "lan-2"]


@pytest.mark.parametrize("strategy", ["local-steps", "stale-sparse", "compressed"])
def test_a_run_whose_islands_are_replicas_keeps_them(strategy: str) -> None:
    seen, begun = moved(strategy)
    assert with_measured_islands(seen, begun) is begun


def test_a_run_with_links_through_the_relay_keeps_them() -> None:
    seen, begun = moved(behind_nat=True)
    assert with_measured_islands(seen, begun) is begun


def test_a_node_of_which_nothing_is_known_moves_no_member() -> None:
    seen, begun = moved()
    b = seen.nodes["b"]
    unknown = replace(b, record=replace(b.record, island_reason=""))
    assert with_measured_islands(replace(seen, nodes={**seen.nodes, "b": unknown}), begun) is begun
