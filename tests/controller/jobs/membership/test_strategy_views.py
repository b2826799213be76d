"""Views that change a run's strategy: when they are proposed, and what becomes of them. One look each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made import changed, clock, free, node
from test_next_view import KILLED, WAY, gone, look, reporting, told, view

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import ObservedJob, ObservedWorker, ViewStage
from atoll.controller.jobs.model.policy import begun_with
from atoll.controller.jobs.model.strategy_in_force import last_change, strategy_in_force
from atoll.controller.state.records import Adapted, JobLearned, JobPins
from atoll.controller.state.views import ViewCause, ViewState
from atoll.strategies.registry import AUTO

BOTH = (view(strategy="dense"),)
TO_LOCAL = JobPins(strategy="local-steps", strategy_by="client:ada")


def trains(number: int = 1, strategy: str = "dense", refusal: str = "") -> ObservedWorker:
    made = reporting(number=number)
    assert made.view_report is not None
    return made._replace(view_report=made.view_report._replace(strategy=strategy, refusal=refusal))


def pinned(seen: ObservedJob, pins: JobPins = TO_LOCAL) -> ObservedJob:
    return replace(seen, job=replace(seen.job, pinned=pins))


def test_another_strategy_is_a_view_of_the_same_members_at_a_boundary() -> None:
    """1. A user pins another strategy. 2. The next view has the same members, at a boundary, by it; its plan keeps the
    split and has no parameters of the strategy before. 3. Nothing follows while that view is pending, or once the
    strategy is the wanted one."""
    step = next_step(pinned(look(trains(), trains(), trains(), views=BOTH)), clock())
    [proposed] = step.views
    assert (proposed.cause, proposed.at_boundary, proposed.ranks) == (ViewCause.STRATEGY, True, (0, 1, 2))
    assert (proposed.strategy, proposed.previous_strategy) == ("local-steps", "dense")
    assert not proposed.keeps_unsent
    assert step.plan is not None
    assert (step.plan.view, step.plan.shares, step.plan.strategy_params) == (2, (1.0, 1.0, 1.0), {})
    assert told(step)[-1].startswith("view 2: asked by client:ada; 3 workers continue from a step boundary")
    pending = pinned(look(trains(), trains(), trains(), views=(*BOTH, proposed)))
    assert next_step(pending, clock()).views == ()
    assert next_step(pinned(look(trains(), trains(), trains(), views=BOTH), JobPins()), clock()).views == ()


@pytest.mark.parametrize("why", ["cannot leave", "refused", "groups", "not stepped"])
def test_no_view_is_proposed_while_the_strategy_cannot_change(why: str) -> None:
    workers, views, pins = [trains()] * 3, BOTH, TO_LOCAL
    if why == "cannot leave":
        word = workers[1].view_report
        assert word is not None
        workers[1] = workers[1]._replace(view_report=word._replace(takes_in=False))
    if why == "groups":
        pins = replace(TO_LOCAL, strategy="groups")
    if why == "not stepped":
        views = (replace(BOTH[0], stepped_unix_s=0.0, step=9),)
    seen = pinned(look(*workers, views=views), pins)
    if why == "refused":
        learned = replace(seen.job.learned, refused_strategies={"local-steps": "a parameter has gaps"})
        seen = replace(seen, job=replace(seen.job, learned=learned))
    assert [one.cause for one in next_step(seen, clock()).views if one.view > 1] == []


def test_a_worker_that_is_ready_joins_first_by_the_strategy_before() -> None:
    record = look(trains(), trains(), trains(), views=BOTH)
    assert record.run is not None
    lost = (view(1, ViewState.ABANDONED, strategy="dense"), view(2, ranks=(0, 2), strategy="dense"))
    members = [replace(one, exit=KILLED if one.rank == 1 else None) for one in record.run.members]
    run = replace(record.run, members=tuple(members))
    with_joiner = next_step(look(trains(2), None, trains(2), views=lost, record=run, free=[free("b")]), clock()).run
    seen = pinned(look(trains(2), None, trains(2), views=lost, record=with_joiner))
    joiner = node("b", {3: reporting(ViewStage.READY, 0)})
    [joined] = next_step(changed(seen, nodes={**seen.nodes, "b": joiner}), clock()).views
    assert (joined.cause, joined.strategy, joined.previous_strategy) == (ViewCause.JOIN, "dense", "")


@pytest.mark.parametrize(("state", "by"), [(ViewState.PROPOSED, "dense"), (ViewState.FORMING, "local-steps")])
def test_a_loss_while_a_strategy_changes_continues_with_the_one_that_members_have_state_of(
    state: ViewState, by: str
) -> None:
    """Before all have left, some may train by the strategy before; afterwards all are ready for the next one."""
    changing = view(2, state, strategy="local-steps", previous_strategy="dense", cause=ViewCause.STRATEGY)
    seen = pinned(look(reporting(ViewStage.BROKEN), gone(), reporting(ViewStage.BROKEN), views=(*BOTH, changing)))
    step = next_step(seen, clock())
    assert [(one.view, one.state) for one in step.views] == [(2, ViewState.ABANDONED), (3, ViewState.PROPOSED)]
    assert (step.views[-1].cause, step.views[-1].strategy) == (ViewCause.LOSS, by)


def test_a_strategy_that_the_script_does_not_allow_is_asked_for_no_more() -> None:
    """1. The members stay with `dense`, and say why. 2. The view is in force by that one, an event says so once, and
    the pin is gone. 3. Nothing is proposed after it."""
    changing = view(2, ViewState.FORMING, strategy="local-steps", previous_strategy="dense", cause=ViewCause.STRATEGY)
    words = [trains(2, "dense", "parameter 0.weight has gaps")] * 3
    seen = pinned(look(*words, views=(*BOTH, changing)))
    step = next_step(seen, clock())
    assert [(one.view, one.state, one.strategy) for one in step.views] == [
        (1, ViewState.ABANDONED, "dense"),
        (2, ViewState.IN_FORCE, "dense"),
    ]
    assert "strategy local-steps is not taken, dense stays: parameter 0.weight has gaps" in told(step)
    assert (step.job.pinned.strategy, step.job.wanted_strategy) == ("", "dense")
    assert step.job.learned.refused_strategies == {"local-steps": "parameter 0.weight has gaps"}
    after = (step.views[0], replace(step.views[1], stepped_unix_s=1.0))
    again = replace(look(*words, views=after), job=step.job)
    assert next_step(again, clock()).views == ()


def test_an_automatic_choice_that_is_refused_at_the_launch_gives_way() -> None:
    """The workers of a launch trained by another strategy than they were told: the record follows them."""
    launched = view(1, ViewState.FORMING, strategy="local-steps")
    seen = look(*[trains(1, "dense", "parameter 0.weight has gaps")] * 3, views=(launched,))
    learned = JobLearned(strategy="local-steps", strategy_reason="links are thin")
    left = replace(seen.job, spec=seen.job.spec.model_copy(update={"strategy": AUTO}), learned=learned)
    step = next_step(replace(seen, job=left), clock())
    assert [(one.state, one.strategy) for one in step.views] == [(ViewState.IN_FORCE, "dense")]
    assert (step.job.wanted_strategy, step.job.pinned.strategy) == ("dense", "")


def test_the_change_is_an_event_with_its_pause_and_stays_in_the_status() -> None:
    now = view(2, strategy="local-steps", previous_strategy="dense", cause=ViewCause.STRATEGY, stepped_unix_s=0.0,
               step=9, reason="asked by client:ada", at_boundary=True, in_force_unix_s=5.0)  # fmt: skip
    before = view(1, ViewState.ABANDONED, strategy="dense", in_force_unix_s=1.0)
    words = [trains(2, "local-steps")] * 3
    step = next_step(pinned(look(*words, views=(before, now))), clock())
    expected = "view 2: switched from dense to local-steps at step 9: asked by client:ada; paused for 0.90 s: "
    assert told(step)[-1].startswith(expected)
    assert WAY.first_step_s == 0.9
    assert last_change(step.job, step.views) == "switched from dense to local-steps at step 9: asked by client:ada"
    assert strategy_in_force(step.job, (before, now)) == "local-steps"


def test_a_plan_begins_with_nothing_of_another_strategy() -> None:
    seen = look(trains(), trains(), trains(), views=BOTH)
    assert seen.plans.newest is not None
    adapted = Adapted(strategy="local-steps", strategy_params={"density": 0.05, "every": 2})
    pins = JobPins(strategy_params={"density": 0.1, "sparsity": 0.5})
    job = replace(seen.job, learned=JobLearned(adapted=adapted), pinned=pins)
    begun = {name: begun_with(job, name, seen.plans.newest).strategy_params for name in ("local-steps", "stale-sparse")}
    assert begun == {"local-steps": {"density": 0.1, "every": 2}, "stale-sparse": {"sparsity": 0.5}}
    assert begun_with(job, "dense", seen.plans.newest).strategy_params == {}
