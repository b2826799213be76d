"""Jobs that leave their strategy to the controller."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from made import changed, clock, free, job, node, observed, profile, run, spec, worker

from atoll.controller.estimators.profile import LinkEstimate
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import JobStep, ObservedJob, ObservedViews
from atoll.controller.jobs.model.peer_links import PeerLink, PeerLinks
from atoll.controller.jobs.model.script_facts import ScriptFacts
from atoll.controller.jobs.strategy.choosing import MAX_SWITCHES, strategy_through_relay
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import JobPhase, JobPins, JobRecord, RunRecord
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

ENTRIES = 25_000_000
COMPUTE_S = 0.26
"""Of a rank's 240 samples in this run, by `made.profile`."""


def peers(bps: float, *names: str) -> PeerLinks:
    link = PeerLink(rtt_s=0.001, bandwidth_bps=bps, measured_unix_s=1.0)
    return PeerLinks(dict.fromkeys(permutations(names, 2), link))


def auto(**fields: Any) -> JobRecord:
    return job(spec=spec(max_workers=2, min_workers=2, strategy="auto"), **fields)


def two_islands() -> RunRecord:
    bare = run("a", "b")
    return replace(bare, members=tuple(replace(one, island=one.node) for one in bare.members))


def view(strategy: str, number: int = 1) -> ViewRecord:
    return ViewRecord(
        job="tiny-0001", run=1, view=number, state=ViewState.IN_FORCE, cause=ViewCause.LAUNCH, reason="it was launched",
        ranks=(0, 1), has_state=(0, 1), master_address="a", master_port=29500, plan=1, wanted=2, proposed_unix_s=1.0,
        strategy=strategy, in_force_unix_s=2.0, stepped_unix_s=3.0,
    )  # fmt: skip


def training(strategy: str, step_s: float, bps: float = 1e8, of: JobRecord | None = None, **fields: Any) -> ObservedJob:
    """A run of two islands, in a view that has been in force for ten seconds."""
    record = of or chosen(strategy)
    known = replace(profile(1, 1, total_batch=480), entries=ENTRIES, step_s=step_s, **fields.pop("known", {}))
    nodes = [node(name, {rank: worker()}) for rank, name in enumerate(("a", "b"))]
    views = ObservedViews(kept=(view(strategy),), since_s=990.0)
    return observed(
        record, two_islands(), *nodes, profile=known, profile_is_news=True, views=views,
        peer_links=peers(bps, "a", "b"), **fields,
    )  # fmt: skip


def look(*args: Any, **fields: Any) -> JobStep:
    return next_step(training(*args, **fields), clock())


def chosen(strategy: str, **fields: Any) -> JobRecord:
    return changed(auto(), strategy=strategy, **fields)


def starting(bps: float | None, record: JobRecord | None = None) -> JobStep:
    nodes = [node(name) for name in ("a", "b")]
    nodes = [replace(one, record=replace(one.record, island=one.record.name)) for one in nodes]
    devices = [free(name) for name in ("a", "b")]
    waiting = changed(record or auto(), phase=JobPhase.QUEUED, run=0)
    links = peers(bps, "a", "b") if bps is not None else PeerLinks()
    return next_step(observed(waiting, None, *nodes, free=devices, peer_links=links), clock())


@pytest.mark.parametrize(
    ("bps", "strategy"), [(None, "dense"), (1e10, "dense"), (1e8, "local-steps"), (1e7, "local-steps")]
)
def test_a_job_begins_by_what_agents_measured(bps: float | None, strategy: str) -> None:
    step = starting(bps)
    assert step.job.wanted_strategy == step.views[0].strategy == strategy
    said = [event.text for event in step.events if "begins by" in event.text]
    assert bool(said) == (strategy != "dense")
    if bps == 1e8:
        assert said == [
            "begins by strategy local-steps: gradients of perhaps 25 million parameters would take 8 s in each step "
            "over the 100 Mbit/s from a to b"
        ]


def test_a_job_begins_by_local_steps_where_islands_are_joined_by_the_relay() -> None:
    nodes = [
        replace(one, record=replace(one.record, island=one.record.name, behind_nat=True)) for one in map(node, "ab")
    ]
    waiting = changed(auto(), phase=JobPhase.QUEUED, run=0)
    step = next_step(observed(waiting, None, *nodes, free=[free(name) for name in "ab"]), clock())
    assert step.views[0].strategy == "local-steps"
    assert strategy_through_relay(auto()) == "local-steps"
    assert strategy_through_relay(changed(auto(), refused_strategies={"local-steps": "no"})) == "dense"
    assert strategy_through_relay(chosen("compressed")) == "compressed"


def test_a_small_model_of_an_earlier_run_begins_by_dense_and_a_choice_stays() -> None:
    """A million parameters take 0.3 s over 100 Mbit/s. What an earlier run chose is kept, and so is a pin."""
    assert starting(1e8, changed(auto(), shared_bytes=12_000_000)).job.wanted_strategy == "dense"
    assert starting(1e10, chosen("local-steps")).job.wanted_strategy == "local-steps"
    assert starting(1e8, replace(auto(), pinned=JobPins(strategy="compressed"))).job.wanted_strategy == "compressed"
    assert starting(1e8, job(spec=spec(max_workers=2, min_workers=2, strategy="dense"))).job.wanted_strategy == "dense"


def test_after_a_few_steps_the_planner_chooses_and_its_record_gives_the_choice_again() -> None:
    """1. Whole gradients over 100 Mbit/s take 8 s in a step: the job wants local-steps. 2. The recorded input gives the
    recorded output. 3. Not before three steps, nor in a view that has just begun, nor of a job with a strategy."""
    step = look("dense", 8.3)
    assert step.job.wanted_strategy == "local-steps"
    assert step.job.learned.strategy_reason.startswith("local-steps: 0.26 s a step")
    assert "dense 8.3 s" in step.job.learned.strategy_reason
    (record,) = step.decisions
    assert (record.planner, record.reason) == ("strategy", step.job.learned.strategy_reason)
    assert PLANNERS["strategy"].run_json(record.input) == record.output
    assert not look("dense", 8.3, known={"steps": 2}).decisions
    fresh = training("dense", 8.3)
    assert not next_step(replace(fresh, views=replace(fresh.views, since_s=999.0)), clock()).decisions
    own = job(spec=spec(max_workers=2, min_workers=2, strategy="dense"))
    assert look("dense", 8.3, of=own).job.wanted_strategy == "dense"
    pinned = replace(auto(), pinned=JobPins(strategy="dense"))
    assert look("dense", 8.3, of=pinned).job.wanted_strategy == "dense"


def test_a_choice_that_stays_is_said_once() -> None:
    step = look("dense", 0.27, 1e10)
    assert [event.text[:22] for event in step.events if "stays" in event.text] == ["strategy dense stays: "]
    assert len(step.decisions) == 1
    again = look("dense", 0.27, 1e10, of=step.job)
    assert (again.events, again.decisions) == ((), ())


def test_a_link_that_falls_and_rises_changes_the_strategy_there_and_back() -> None:
    """1. By dense at 10 Gbit/s; the link falls, and a step takes 40 s for its gradients. 2. The agents' old measurement
    does not count: steps show 20 Mbit/s. 3. By local-steps the link rises; its own measurement says so."""
    down = look("dense", 40.0, 1e10, of=chosen("dense", strategy_judged=True))
    assert down.job.wanted_strategy == "local-steps"
    left = down.job.learned.left_strategy
    assert left is not None
    assert left.bandwidth_bps == pytest.approx(20e6, rel=0.05)
    thin = {"links": {name: LinkEstimate(bandwidth_bps=20e6, error=0.1) for name in ("a", "b")}}
    assert look("local-steps", 0.3, 1e10, of=down.job, known=thin).job.wanted_strategy == "local-steps"
    fast = {"links": {name: LinkEstimate(bandwidth_bps=1e10, error=0.1) for name in ("a", "b")}}
    up = look("local-steps", 0.4, 1e10, of=down.job, known=fast)
    assert (up.job.wanted_strategy, up.job.learned.strategy_switches) == ("dense", 2)


def test_a_prediction_that_failed_is_not_tried_again_on_the_same_link() -> None:
    """local-steps was predicted to take 0.26 s and took 20: back to dense, and from there not again."""
    links = {"links": {name: LinkEstimate(bandwidth_bps=1e8, error=0.1) for name in ("a", "b")}}
    refused = ScriptFacts(entries=ENTRIES, tensors=1, refused={"compressed": "no", "stale-sparse": "no", "zen": "no"})
    back = look("local-steps", 20.0, of=chosen("local-steps"), known=links, script=refused)
    assert back.job.wanted_strategy == "dense"
    assert look("dense", 8.3, of=back.job, script=refused).job.wanted_strategy == "dense"


def test_changes_are_counted_and_end() -> None:
    last = look("dense", 8.3, of=chosen("dense", strategy_switches=MAX_SWITCHES - 1))
    assert any("is the last that the controller chooses" in event.text for event in last.events)
    over = look("dense", 8.3, of=chosen("dense", strategy_switches=MAX_SWITCHES))
    assert over.job.wanted_strategy == "dense"


def test_what_the_script_refuses_is_not_chosen() -> None:
    why = "a hook on a parameter"
    script = ScriptFacts(
        entries=ENTRIES, tensors=1, refused={"local-steps": why, "stale-sparse": why}, strategy="dense"
    )
    step = look("dense", 8.3, script=script)
    assert step.job.wanted_strategy == "compressed"


def test_what_agents_measure_counts_by_itself_only_a_while_after_a_change() -> None:
    """By local-steps small bursts show 20 Mbit/s. The agents' 10 Gbit/s is of before the change, then of 41 s later."""
    thin = {"links": {name: LinkEstimate(bandwidth_bps=20e6, error=0.1) for name in ("a", "b")}}
    for measured_unix_s, strategy in ((1.0, "local-steps"), (2.0 + 41.0, "dense")):
        link = PeerLink(rtt_s=0.001, bandwidth_bps=1e10, measured_unix_s=measured_unix_s)
        links = PeerLinks({("a", "b"): link, ("b", "a"): link})
        seen = training("local-steps", 0.4, of=chosen("local-steps", strategy_judged=True), known=thin)
        assert next_step(replace(seen, peer_links=links), clock()).job.wanted_strategy == strategy


def test_on_one_island_nothing_is_said() -> None:
    seen = training("dense", 0.27, 1e10)
    here = replace(seen, run=run("a", "b"), peer_links=PeerLinks())
    step = next_step(here, clock())
    assert (step.events, step.decisions, step.job.wanted_strategy) == ((), (), "dense")
