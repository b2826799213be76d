from __future__ import annotations

from dataclasses import replace

from made import JOB, exited, node, worker

from atoll.controller.jobs.model.observed import ForgetWorker, ObservedNode, StopRun
from atoll.controller.jobs.model.supply import MIN_EDGE_MEASUREMENTS, HelpedRank, MeasuredEdges
from atoll.controller.jobs.volunteers.helping import (
    DRAWS,
    STOP_GRACE_S,
    HelpedRuns,
    LaunchHelper,
    MoveHelper,
    device_of,
    helped_by,
    helper_number,
    helping_actions,
)
from atoll.controller.state.records import WorkerExitKind
from atoll.jobs.job_spec import MAX_WORKERS
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_RANK

FIRST, SECOND = HelpedRank(0, "a.lan", 5000), HelpedRank(1, "b.lan", 5001)
RUNS: HelpedRuns = {(JOB, 1): [FIRST, SECOND]}


def with_devices(found: ObservedNode, count: int) -> ObservedNode:
    device = found.record.devices[0]
    devices = tuple(replace(device, index=index) for index in range(count))
    return replace(found, record=replace(found.record, devices=devices))


def test_numbers_say_the_device_and_whom_it_helps_and_are_beyond_all_ranks() -> None:
    for device in (0, 1, 63):
        for rank in (0, 1, MAX_WORKERS - 1):
            for draw in (0, 1, DRAWS - 1):
                number = helper_number(device, rank, draw)
                assert MAX_WORKERS <= number < MAX_RANK
                assert (device_of(number), helped_by(number)) == (device, rank)


def test_devices_help_the_rank_of_a_run_that_has_least() -> None:
    nodes = [with_devices(node("v"), 2), node("w")]
    assert list(helping_actions(nodes, RUNS, set())) == [
        LaunchHelper("v", 0, JOB, 1, FIRST),
        LaunchHelper("v", 1, JOB, 1, SECOND),
        LaunchHelper("w", 0, JOB, 1, FIRST),
    ]
    assert not list(helping_actions(nodes, {}, set()))
    measured: HelpedRuns = {(JOB, 1): [replace(FIRST, per_power=3.0), replace(SECOND, per_power=1.0)]}
    assert [one.helps.rank for one in helping_actions(nodes, measured, set()) if isinstance(one, LaunchHelper)] == [
        1,
        1,
        0,
    ]


def test_one_moves_to_the_rank_that_starves_once_helpers_stay_and_nobody_moves_back() -> None:
    """1. Three help rank 0, nobody rank 1, whose stage is three times as much work for each sample. 2. As long as
    helpers come and go nobody moves. 3. Then one does, and says why, and later a second. The
    third would be missed more than it gains, and so would one that went back."""
    helping = [node(name, {helper_number(0, 0, draw): worker()}) for draw, name in enumerate("abc")]
    runs: HelpedRuns = {(JOB, 1): [replace(FIRST, per_power=3.0), replace(SECOND, per_power=1.0)]}
    assert not list(helping_actions(helping, runs, set()))
    (move,) = helping_actions(helping, runs, set(), settled={(JOB, 1)})
    assert isinstance(move, MoveHelper)
    assert (move.node, move.device, move.rank, move.stop.ranks) == ("a", 0, 1, (helper_number(0, 0, 0),))
    assert move.stop.reason.startswith("rank 1 has 1 samples a second of help and rank 0 12:")
    for count, moves in ((1, 1), (2, 0), (3, 0)):
        moved = [node(name, {helper_number(0, int(draw < count), draw): worker()}) for draw, name in enumerate("abc")]
        assert len(list(helping_actions(moved, runs, set(), settled={(JOB, 1)}))) == moves


def test_who_helps_a_rank_that_was_lost_ends_at_once_and_none_while_ranks_are_not_known() -> None:
    """1. v helps rank 1, which was lost: the run goes on with rank 0. 2. A controller that has just begun to lead knows
    of no rank yet."""
    number = helper_number(0, 1, 5)
    helping = [node("v", {number: worker()})]
    stop, launch = helping_actions(helping, {(JOB, 1): [FIRST]}, set())
    assert isinstance(stop, StopRun)
    assert (stop.ranks, stop.reason) == ((number,), "the rank that it helps is gone")
    assert launch == LaunchHelper("v", 0, JOB, 1, FIRST)
    assert not list(helping_actions(helping, {(JOB, 1): []}, set()))


def test_the_run_with_the_fewest_helpers_comes_first_and_who_helps_stays() -> None:
    helps = {helper_number(0, 0, 7): worker()}
    runs = {(JOB, 1): [FIRST], ("other", 3): [SECOND]}
    assert list(helping_actions([node("v", helps), node("w")], runs, set())) == [
        LaunchHelper("w", 0, "other", 3, SECOND)
    ]


def test_who_measured_its_links_goes_to_the_nearer_rank_at_once_and_comes_back_there() -> None:
    """1. v helps rank 0, to which 64 KiB take two seconds and back; rank 1 is near. 2. As soon as it told that a second
    time, and has done a task, it is stopped there, and why is said: not before. 3. Its device helps rank 1 then, though
    that has more help, and stays."""
    edges = {("v", 0, JOB): {0: 2.0, 1: 0.05}}
    far, near = (node("v", {helper_number(0, rank, 5): worker(step=1)}) for rank in (0, 1))
    fresh = {("v", WorkerKey(JOB, 1, helper_number(0, rank, 5))): MIN_EDGE_MEASUREMENTS for rank in (0, 1)}
    assert not list(helping_actions([far], RUNS, set(), edges=edges))
    assert not list(helping_actions([far], RUNS, set(), edges=edges, fresh=dict.fromkeys(fresh, 1)))
    begins = node("v", {helper_number(0, 0, 5): worker()})
    assert not list(helping_actions([begins], RUNS, set(), edges=edges, fresh=fresh))
    (move,) = helping_actions([far], RUNS, set(), edges=edges, fresh=fresh)
    assert isinstance(move, MoveHelper)
    assert (move.node, move.rank) == ("v", 1)
    assert "is 50 ms from it, the other 2000 ms" in move.stop.reason
    others = [node(name, {helper_number(0, 1, 5): worker()}) for name in ("b", "c")]
    (back,) = helping_actions([*others, node("v")], RUNS, set(), edges=edges)
    assert isinstance(back, LaunchHelper)
    assert back.helps == SECOND
    assert not list(helping_actions([near], RUNS, set(), edges=edges, fresh=fresh, settled={(JOB, 1)}))


def test_one_measurement_of_a_busy_machine_moves_nobody() -> None:
    """1. As it starts, a device measures two seconds to the rank beside it. 2. The next time it is what the link takes:
    of each rank the shorter one of the last two counts. 3. A link that has become long is seen by the second time."""
    busy = MeasuredEdges().again({0: 2.0, 1: 0.06})
    calm = busy.again({0: 0.05, 1: 0.08, 2: 0.3})
    assert (busy.times, calm.times) == (1, 2)
    assert calm.edges == {0: 0.05, 1: 0.06, 2: 0.3}
    number = helper_number(0, 0, 5)
    helping, fresh = [node("v", {number: worker(step=3)})], {("v", WorkerKey(JOB, 1, number)): calm.times}
    for edges, moves in ((busy.edges, 1), (calm.edges, 0)):
        assert len(list(helping_actions(helping, RUNS, set(), edges={("v", 0, JOB): edges}, fresh=fresh))) == moves
    assert calm.again({0: 3.0, 1: 0.07}).again({0: 3.0, 1: 0.07}).edges == {0: 3.0, 1: 0.07}


def test_helpers_of_runs_that_are_over_end_and_ends_are_forgotten() -> None:
    """1. A helper of run 1, which is over. 2. One that ended, on a device that starts another at once. 3. Two on one
    device: the order was repeated, and both came. 4. A volunteer that says it has a rank."""
    old, dead, kept, surplus = (helper_number(0, 0, draw) for draw in (1, 2, 3, 4))
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
    helps = {helper_number(0, 0, 7): worker()}
    assert not list(helping_actions([node("v", helps), node("w")], {(JOB, 1): []}, set()))
