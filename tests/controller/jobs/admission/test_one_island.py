"""Jobs on several islands, and what their users are told of one. Each rank computes 80 of 240 samples in 0.1 s, so an
island of one device has the whole batch after 0.31 s."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from made import changed, clock, job, node, observed, profile, run, spec, worker

from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import JobStep, ObservedJob
from atoll.controller.planners.registry import PLANNERS
from atoll.controller.state.records import JobRecord, RunRecord
from atoll.strategies.local_steps.settings import LocalSteps

NAMES = ("a", "b", "c")


def training(
    step_s: float, islands: tuple[str, ...] = NAMES, of: JobRecord | None = None, known: Profile | None = None
) -> ObservedJob:
    """A run that has trained for 20 s, a node an island, with steps of so long."""
    record = of or job(spec=spec(max_workers=3, min_workers=3))
    nodes = [node(name, {rank: worker()}) for rank, name in enumerate(NAMES)]
    seen = known or profile(1, 1, 1)
    seen = replace(seen, step_s=step_s)
    return observed(record, on(*islands), *nodes, profile=seen, profile_is_news=True)


def on(*islands: str) -> RunRecord:
    bare = run(*NAMES)
    members = [replace(one, island=name) for one, name in zip(bare.members, islands, strict=True)]
    return replace(bare, members=tuple(members))


def told(step: JobStep) -> list[str]:
    return [event.text for event in step.events if event.kind == "ADVICE"]


def look(step_s: float, of: JobRecord | None = None, **fields: Any) -> JobStep:
    return next_step(training(step_s, of=of, **fields), clock())


def test_one_island_that_is_sooner_is_told_once_with_both_times_and_again_when_it_changes() -> None:
    """1. Steps of 2 s, alone 0.31: told. 2. The same again, and about the same: silence. 3. Steps of 8 s: told anew.
    4. Of 0.32 s: not clearly sooner, nor clearly not; silence. 5. Of 0.2 s: it is no longer so. 6. Silence."""
    first = look(2.0)
    text = (
        "one island with all the data would be sooner: a alone takes 0.31 s for a step of 240 samples, all 3 islands "
        "together 2 s"
    )
    assert told(first) == [text]
    advice = first.job.learned.one_island
    assert advice is not None
    assert (advice.island, advice.together_s, advice.reason) == ("a", 2.0, text)
    assert '"sooner": true' in PLANNERS["one-island"].run_json(advice.input)
    for step_s in (2.0, 1.5, 2.5):
        again = look(step_s, of=first.job)
        assert (told(again), again.job.learned.one_island) == ([], advice)
    worse = look(8.0, of=first.job)
    assert "together 8 s" in "".join(told(worse))
    nearly = look(0.32, of=worse.job)
    assert (told(nearly), nearly.job.learned.one_island) == ([], worse.job.learned.one_island)
    mended = look(0.2, of=nearly.job)
    assert told(mended) == [
        "one island alone is no longer sooner: a alone takes 0.31 s for a step of 240 samples, all 3 islands together "
        "0.2 s"
    ]
    assert mended.job.learned.one_island is None
    assert told(look(0.2, of=mended.job)) == []


def test_equally_fast_islands_do_not_take_turns_in_being_named() -> None:
    first = look(2.0)
    ranks = dict(profile(1, 1, 1).ranks)
    ranks[1] = replace(ranks[1], compute_s=0.098)
    assert told(look(2.0, of=first.job, known=replace(profile(1, 1, 1), ranks=ranks))) == []
    ranks[1] = replace(ranks[1], compute_s=0.05)
    [text] = told(look(2.0, of=first.job, known=replace(profile(1, 1, 1), ranks=ranks)))
    assert ": b alone takes 0.16 s" in text


def test_an_island_counts_with_all_its_devices_and_says_what_is_left_out() -> None:
    [text] = told(look(2.0, islands=("x", "x", "y")))
    assert "x alone takes 0.16 s for a step of 240 samples, all 2 islands together 2 s; what its 2 devices" in text


def test_a_run_on_one_island_is_told_nothing_and_forgets_what_it_was_told() -> None:
    step = look(2.0, of=look(2.0).job, islands=("a", "a", "a"))
    assert (told(step), step.job.learned.one_island) == ([], None)


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "groups", "strategy_settings": {"stages": 3}},
        {"strategy": "groups"},
        {"strategy": "volunteer"},
    ],
)
def test_where_steps_cannot_be_compared_nothing_is_said(fields: dict[str, Any]) -> None:
    """A model in stages may not fit into one island; replicas that train at their own pace have no common step."""
    assert told(look(2.0, of=job(spec=spec(max_workers=3, min_workers=3, **fields)))) == []


def test_nothing_is_said_before_every_rank_was_measured_for_a_while_under_the_present_plan() -> None:
    known = profile(1, 1, 1)
    partly = replace(known, ranks={rank: one for rank, one in known.ranks.items() if rank})
    for less in (partly, replace(known, steps=3), replace(known, plan=2)):
        assert told(look(2.0, known=less)) == []
    assert told(next_step(changed(training(2.0), planned_s=clock().now_s - 1), clock())) == []
    assert told(next_step(dataclasses.replace(changed(training(2.0), profile_is_news=False)), clock())) == []


def test_a_strategy_that_learns_less_in_a_step_counts_as_measured_only_by_its_defaults() -> None:
    def steps_of(**settings: Any) -> str:
        said = LocalSteps(**settings).said()
        step = look(2.0, of=job(spec=spec(max_workers=3, strategy="local-steps", strategy_settings=said)))
        advice = step.job.learned.one_island
        assert advice is not None
        return f"{advice.together_s:.3g}"

    assert steps_of(density=0.9) == "2"
    assert float(steps_of()) >= 2


def test_a_plan_that_sends_less_counts_with_what_it_costs_in_learning() -> None:
    """Steps of 0.25 s are sooner than one island's 0.31, but not where the uplink lets 1.4 % leave."""

    def words_under(**params: float) -> list[str]:
        of = job(spec=spec(max_workers=3, min_workers=3, strategy="local-steps"))
        seen = training(0.25, of=of)
        newest = seen.plans.newest
        assert newest is not None
        planned = replace(newest, strategy_params=params)
        return told(next_step(changed(seen, issued=(planned,)), clock()))

    assert words_under() == words_under(density=0.2) == []
    [text] = words_under(density=0.014)
    assert text.endswith("together 0.427 s (0.25 s a step, and 1.71 of local-steps for one of dense)")
