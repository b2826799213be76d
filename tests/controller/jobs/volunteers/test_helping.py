from __future__ import annotations

from dataclasses import replace

from made import JOB, exited, node, worker

from atoll.controller.jobs.lifecycle.observed import ForgetWorker, ObservedNode, StopRun
from atoll.controller.jobs.volunteers.helping import (
    DRAWS,
    STOP_GRACE_S,
    HelpedRank,
    HelpedRuns,
    LaunchHelper,
    device_of,
    helper_number,
    helping_actions,
)
from atoll.controller.state.records import WorkerExitKind
from atoll.jobspec import MAX_WORKERS
from atoll.message_limits import MAX_RANK
from atoll.worker_key import WorkerKey

FIRST, SECOND = HelpedRank(0, "a.lan", 5000), HelpedRank(1, "b.lan", 5001)
RUNS: HelpedRuns = {(JOB, 1): [FIRST, SECOND]}


def with_devices(found: ObservedNode, count: int) -> ObservedNode:
    device = found.record.devices[0]
    devices = tuple(replace(device, index=index) for index in range(count))
    return replace(found, record=replace(found.record, devices=devices))


def test_numbers_say_the_device_and_are_beyond_all_ranks() -> None:
    for device in (0, 1, 63):
        for draw in (0, 1, DRAWS - 1):
            assert MAX_WORKERS <= helper_number(device, draw) < MAX_RANK
            assert device_of(helper_number(device, draw)) == device


def test_devices_help_the_ranks_of_a_run_in_turn() -> None:
    nodes = [with_devices(node("v"), 2), node("w")]
    assert list(helping_actions(nodes, RUNS, set())) == [
        LaunchHelper("v", 0, JOB, 1, FIRST),
        LaunchHelper("v", 1, JOB, 1, SECOND),
        LaunchHelper("w", 0, JOB, 1, FIRST),
    ]
    assert not list(helping_actions(nodes, {}, set()))


def test_the_run_with_the_fewest_helpers_comes_first_and_who_helps_stays() -> None:
    helps = {helper_number(0, 7): worker()}
    runs = {(JOB, 1): [FIRST], ("other", 3): [SECOND]}
    assert list(helping_actions([node("v", helps), node("w")], runs, set())) == [
        LaunchHelper("w", 0, "other", 3, SECOND)
    ]


def test_helpers_of_runs_that_are_over_end_and_ends_are_forgotten() -> None:
    """1. A helper of run 1, which is over. 2. One that ended, on a device that starts another at once. 3. Two on one
    device: the order was repeated, and both came. 4. A volunteer that says it has a rank."""
    old, dead, kept, surplus = (helper_number(0, draw) for draw in (1, 2, 3, 4))
    nodes = [
        node("old", {old: worker()}, run=1),
        node("dead", {dead: worker(exit=exited(WorkerExitKind.SIGNALLED, -9))}, run=2),
        node("twice", {kept: worker(), surplus: worker()}, run=2),
        node("liar", {0: worker()}, run=2),
    ]
    found = list(helping_actions(nodes, {(JOB, 2): [FIRST]}, set()))
    assert ForgetWorker("dead", WorkerKey(JOB, 2, dead)) in found
    assert {(one.node, one.run, one.ranks) for one in found if isinstance(one, StopRun)} == {
        ("old", 1, (old,)),
        ("twice", 2, (surplus,)),
        ("liar", 2, (0,)),
    }
    assert {one.grace_s for one in found if isinstance(one, StopRun)} == {STOP_GRACE_S}
    assert [one.node for one in found if isinstance(one, LaunchHelper)] == ["dead", "liar", "old"]


def test_who_failed_rests() -> None:
    assert not list(helping_actions([node("v")], RUNS, {("v", 0, JOB)}))
    assert len(list(helping_actions([node("v")], RUNS, {("v", 0, "other")}))) == 1


def test_who_helps_stays_while_a_new_leader_does_not_know_its_rank_yet_and_nobody_else_comes() -> None:
    helps = {helper_number(0, 7): worker()}
    assert not list(helping_actions([node("v", helps), node("w")], {(JOB, 1): []}, set()))
