from __future__ import annotations

from made import free

from atoll.controller.jobs.model.start import StartDecision, StartRequest, decide_start, same_work
from atoll.controller.state.records import Standby

PORTS = {"a": (29500, 29501), "b": (29500,), "c": (29500,)}


def ranks(decision: StartDecision) -> list[tuple[str, int]]:
    return [(m.node, m.device) for m in decision.members]


def test_too_few_devices_are_waited_for() -> None:
    decision = decide_start(100.0, StartRequest(2, 4, 0.0), [free("a")], PORTS)
    assert decision == StartDecision((), "waiting for devices: 1 free, at least 2 needed")


def test_enough_but_not_all_devices_are_given_a_moment_and_kept_meanwhile() -> None:
    devices = [free("a"), free("b", since_s=99.5)]
    decision = decide_start(100.0, StartRequest(1, 4, 0.0), devices, PORTS)
    assert decision.reason == "2 of at most 4 devices are free; waiting 0.5 s for more"
    assert decision.held == tuple(devices)
    assert ranks(decide_start(100.6, StartRequest(1, 4, 0.0), devices, PORTS)) == [("a", 0), ("b", 0)]


def test_as_many_as_can_be_used_start_at_once() -> None:
    decision = decide_start(100.0, StartRequest(1, 2, 100.0), [free("b", 100.0), free("a", 100.0)], PORTS)
    assert ranks(decision) == [("a", 0), ("b", 0)]
    assert decision.reason == "starting 2 workers on 2 nodes"
    assert decision.master_port == 29500


def test_the_same_devices_in_any_order_give_the_same_ranks() -> None:
    devices = [free("b"), free("a", index=1), free("c"), free("a", index=0)]
    expected = decide_start(9.0, StartRequest(4, 4, 0.0), devices, PORTS)
    assert decide_start(9.0, StartRequest(4, 4, 0.0), devices[::-1], PORTS) == expected
    assert [(m.rank, m.node, m.device, m.node_rank, m.local_rank, m.local_world_size) for m in expected.members] == [
        (0, "a", 0, 0, 0, 2),
        (1, "a", 1, 0, 1, 2),
        (2, "b", 0, 1, 0, 1),
        (3, "c", 0, 2, 0, 1),
    ]


def test_the_fastest_devices_are_taken_when_there_are_more_than_needed() -> None:
    devices = [free("a", speed=0.4), free("b"), free("c", speed=0.6)]
    assert ranks(decide_start(9.0, StartRequest(1, 2, 0.0), devices, PORTS)) == [("b", 0), ("c", 0)]


def test_workers_that_hold_a_model_together_start_together() -> None:
    """Of five free devices a job with pipelines of two stages takes four, and of three two."""
    devices = [free(name, index=index) for name in "abc" for index in (0, 1)][:5]
    for count, taken in ((5, 4), (3, 2)):
        decision = decide_start(9.0, StartRequest(2, 6, 0.0, stages=2), devices[:count], PORTS)
        assert len(decision.members) == taken


def test_rank_0_goes_to_a_node_that_stayed_and_has_a_port() -> None:
    devices = [free("a"), free("b"), free("c")]
    survived = StartRequest(3, 3, 0.0, survivors=frozenset({"b", "c"}))
    assert ranks(decide_start(9.0, survived, devices, PORTS))[0] == ("b", 0)
    assert ranks(decide_start(9.0, survived, devices, {**PORTS, "b": ()}))[0] == ("c", 0)


def test_without_a_rendezvous_port_nothing_starts() -> None:
    decision = decide_start(9.0, StartRequest(1, 1, 0.0), [free("a")], {"a": ()})
    assert (decision.members, decision.reason) == ((), "waiting: no chosen node offers a free rendezvous port")


def test_kinds_are_not_mixed_and_cuda_comes_first_if_it_suffices() -> None:
    devices = [free("a"), free("b"), free("c", kind="cuda")]
    assert ranks(decide_start(9.0, StartRequest(1, 1, 0.0), devices, PORTS)) == [("c", 0)]
    assert ranks(decide_start(9.0, StartRequest(2, 2, 0.0), devices, PORTS)) == [("a", 0), ("b", 0)]


def test_a_failed_job_waits_before_its_next_try() -> None:
    wanted = StartRequest(1, 1, since_s=100.0, retry_delay_s=4.0)
    assert decide_start(101.0, wanted, [free("a")], PORTS).reason == "waiting 3 s before the next try"
    assert ranks(decide_start(104.0, wanted, [free("a")], PORTS)) == [("a", 0)]


def test_a_device_far_slower_than_the_fastest_waits_until_a_step_was_measured() -> None:
    devices = [free("a", work_per_s=50.0), free("b", work_per_s=20.0), free("c", work_per_s=4.0)]
    decision = decide_start(9.0, StartRequest(1, 3, 0.0), devices, PORTS)
    assert ranks(decision) == [("a", 0), ("b", 0)]
    assert decision.standby == {
        "c/0": Standby(reason="12 times slower than the fastest device, and no step was measured yet", work_per_s=4.0)
    }
    assert len(decide_start(9.0, StartRequest(3, 3, 0.0), devices, PORTS).members) == 3  # so many were asked for


def test_where_the_batch_is_known_a_device_waits_whose_share_of_it_is_less_than_a_sample() -> None:
    devices = [free("a", work_per_s=50.0), free("b", work_per_s=50.0), free("c", work_per_s=1.0)]
    small = decide_start(9.0, StartRequest(1, 3, 0.0, total_batch=64), devices, PORTS)
    assert ranks(small) == [("a", 0), ("b", 0)]
    assert small.standby["c/0"].reason.endswith("its fair share of the batch is less than a sample")
    assert len(decide_start(9.0, StartRequest(1, 3, 0.0, total_batch=128), devices, PORTS).members) == 3


def test_devices_that_were_not_all_measured_are_taken_as_they_are() -> None:
    devices = [free("a", work_per_s=50.0), free("b", work_per_s=0.1), free("c")]
    assert len(decide_start(9.0, StartRequest(1, 3, 0.0), devices, PORTS).members) == 3
    learned = StartRequest(1, 3, 0.0, learned={"a/0": 0.001, "b/0": 0.02, "c/0": 0.001})
    assert ranks(decide_start(9.0, learned, devices, PORTS)) == [("a", 0), ("c", 0)]


def test_a_standby_stays_out_of_the_next_start_unless_it_is_needed_or_has_changed() -> None:
    standby = {"b/0": Standby(reason="the run was slower with it", work_per_s=1.0, slowed=1)}
    devices = [free("a", work_per_s=1.0), free("b", work_per_s=1.1)]
    assert ranks(decide_start(9.0, StartRequest(1, 2, 0.0, standby=standby), devices, PORTS)) == [("a", 0)]
    assert len(decide_start(9.0, StartRequest(2, 2, 0.0, standby=standby), devices, PORTS).members) == 2
    changed = [free("a", work_per_s=1.0), free("b", work_per_s=2.0)]
    assert len(decide_start(9.0, StartRequest(1, 2, 0.0, standby=standby), changed, PORTS).members) == 2
    alone = decide_start(9.0, StartRequest(1, 2, 0.0, standby=standby), devices[1:], PORTS)
    assert (ranks(alone), alone.standby) == ([("b", 0)], {})


def test_devices_are_ranked_by_what_they_measured_and_a_survivor_is_not_passed_over_for_noise() -> None:
    wanted = StartRequest(1, 1, 0.0, survivors=frozenset({"a"}))
    devices = [free("a", work_per_s=1.0), free("b", work_per_s=1.2)]
    assert ranks(decide_start(9.0, wanted, devices, PORTS)) == [("a", 0)]
    devices = [free("a", work_per_s=1.0), free("b", work_per_s=1.3)]
    assert ranks(decide_start(9.0, wanted, devices, PORTS)) == [("b", 0)]


def test_work_that_was_not_measured_changes_nothing() -> None:
    assert same_work(0.0, 5.0)
    assert same_work(5.0, 0.0)
    assert same_work(1.0, 1.4)
    assert not same_work(1.0, 1.6)
    assert not same_work(1.6, 1.0)
