from __future__ import annotations

from dataclasses import replace

from made import changed, clock, ended, exited, free, job, node, observed, run, spec

from atoll.controller.jobs.admission.free_devices import kept_free
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.start import StartRequest, decide_start
from atoll.controller.state.records import JobPhase, NodeRecord, Standby, WorkerExitKind

PORTS = dict.fromkeys("abcde", (29500,))


def records(*names: str) -> dict[str, NodeRecord]:
    return {name: node(name).record for name in names}


def test_as_many_free_devices_as_asked_for_are_kept_first_those_on_other_machines() -> None:
    wants = job(spec=spec(standby=2))
    devices = [free("a", index=1), free("c"), free("d"), free("e", kind="cuda")]
    assert kept_free([(wants, run("a", "b"))], devices, records("a", "b")) == {wants.id: (free("c"), free("d"))}
    more = replace(wants, spec=spec(standby=4))
    kept = kept_free([(more, run("a", "b"))], devices, records("a", "b"))[wants.id]
    assert kept == (free("c"), free("d"), free("a", index=1)), "none of another kind"


def test_the_older_job_is_served_first_and_one_that_waits_ended_or_asked_for_none_keeps_nothing() -> None:
    old, young = job(id="old", spec=spec(standby=1)), job(id="young", spec=spec(standby=1))
    jobs = [
        (job(id="plain"), run("a")),
        (job(JobPhase.QUEUED, id="new", spec=spec(standby=1)), None),
        (job(JobPhase.DONE, id="done", spec=spec(standby=1)), run("a")),
        (old, run("a")),
        (young, run("b")),
    ]
    kept = kept_free(jobs, [free("c"), free("d")], records("a", "b"))
    assert kept == {"old": (free("c"),), "young": (free("d"),)}
    lost = changed(old, phase=JobPhase.QUEUED)
    assert kept_free([(lost, run("a"))], [free("c")], {}) == {"old": (free("c"),)}, "most of all after a loss"


def test_a_device_that_was_left_out_as_too_slow_is_no_standby() -> None:
    wants = job(spec=spec(standby=1), standby={"c/0": Standby(reason="slow")})
    assert kept_free([(wants, run("a"))], [free("c"), free("d")], records("a")) == {wants.id: (free("d"),)}


def test_a_standby_takes_the_rank_of_the_lost_one_and_all_others_keep_theirs() -> None:
    lost = exited(WorkerExitKind.LOST)
    before = ended(run("c", "b", "a"), exited(WorkerExitKind.DRAINED), lost, exited(WorkerExitKind.DRAINED))
    queued = job(JobPhase.QUEUED, spec=spec(min_workers=1, max_workers=3, standby=1))
    there = [free(name) for name in "acd"]
    nodes = [node(name) for name in "acd"]
    step = next_step(observed(queued, before, *nodes, free=there, ports=PORTS), clock())
    assert step.run is not None
    assert [m.node for m in step.run.members] == ["c", "d", "a"]
    assert step.job.status.phase is JobPhase.STARTING, "without waiting for more devices"


def test_seats_are_kept_with_several_devices_and_without_a_standby_the_rest_moves_up() -> None:
    wanted = StartRequest(1, 6, 0.0, seats=(("b", 2), ("c", 2), ("a", 1)), survivors=frozenset("ab"))
    devices = [free("b"), free("b", index=1), free("a"), free("d"), free("e"), free("e", index=1)]
    decision = decide_start(9.0, wanted, devices, PORTS)
    assert [(m.rank, m.node, m.device) for m in decision.members] == [
        *[(0, "b", 0), (1, "b", 1)],
        *[(2, "e", 0), (3, "e", 1)],  # as many devices as c had
        *[(4, "a", 0), (5, "d", 0)],
    ]
    fewer = decide_start(9.0, wanted, devices[:3], PORTS)
    assert [m.node for m in fewer.members] == ["b", "b", "a"]


def test_rank_0_changes_places_where_its_node_has_no_rendezvous_port() -> None:
    wanted = StartRequest(1, 3, 0.0, seats=(("c", 1), ("b", 1), ("a", 1)))
    decision = decide_start(9.0, wanted, [free("a"), free("b"), free("c")], {**PORTS, "c": ()})
    assert [m.node for m in decision.members] == ["b", "c", "a"]
