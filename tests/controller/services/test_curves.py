"""Curves: what is kept of the numbers that scripts report, and what is served of them over real gRPC."""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from daemons import CALL_S, Controller, bundle, controller, leading
from fake_agent import FakeAgent

from atoll.controller.services.curves import MAX_CURVES, CurveStore
from atoll.v1 import agents_pb2, common_pb2
from atoll.v1 import jobs_pb2 as pb

CODE = bundle({"train.py": b"print('hello')\n"})


def reported(steps: range, **values: float) -> list[common_pb2.Metrics]:
    return [common_pb2.Metrics(step=step, values=values or {"loss": 1.0 / (step + 1)}) for step in steps]


@pytest.fixture
def store(tmp_path: Path) -> CurveStore:
    return CurveStore(tmp_path / "curves.sqlite3", max_points=100)


def test_a_curve_is_kept_over_restarts_and_a_batch_that_comes_twice_once(store: CurveStore, tmp_path: Path) -> None:
    store.add("a-1", 1, 5.0, reported(range(10)))
    store.add("a-1", 1, 6.0, reported(range(5, 15)))
    store.add("b-1", 1, 6.0, reported(range(3), accuracy=0.5))
    store.close()
    again = CurveStore(tmp_path / "curves.sqlite3")
    assert (again.names("a-1"), again.names("b-1"), again.names("c-1")) == (["loss"], ["accuracy"], [])
    kept = again.read("a-1", "loss")
    assert kept.steps == tuple(range(15))
    assert kept.values == tuple(1.0 / (step + 1) for step in range(15))
    assert kept.unix_s == (5.0,) * 5 + (6.0,) * 10


def test_a_later_run_replaces_what_was_said_of_steps_that_were_lost(store: CurveStore) -> None:
    """1. Run 1 reports up to step 30. 2. Run 2 goes on at step 20 and reports every fourth step. 3. Nothing of run 1
    is left from there on. 4. What comes late of run 1 changes nothing that run 2 has said."""
    store.add("a-1", 1, 0.0, reported(range(31)))
    store.add("a-1", 2, 0.0, reported(range(20, 40, 4), loss=7.0))
    kept = store.read("a-1", "loss")
    assert kept.steps == (*range(20), 20, 24, 28, 32, 36)
    assert kept.runs == (1,) * 20 + (2,) * 5
    store.add("a-1", 1, 0.0, reported(range(18, 31)))
    assert store.read("a-1", "loss") == kept


def test_values_that_are_not_finite_are_kept(store: CurveStore) -> None:
    store.add("a-1", 1, 0.0, [*reported(range(1), loss=math.nan), *reported(range(1, 2), loss=-math.inf)])
    nan, infinite = store.read("a-1", "loss").values
    assert math.isnan(nan)
    assert infinite == -math.inf


def test_long_curves_are_thinned_and_many_names_are_refused(store: CurveStore) -> None:
    """A script that reports for ever, and one that invents names, take a bounded part of the disk."""
    for start in range(0, 1000, 50):
        store.add("a-1", 1, 0.0, reported(range(start, start + 50)))
    steps = store.read("a-1", "loss").steps
    assert 25 <= len(steps) <= 100
    assert steps[-1] == 999
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 3 * 1000 / 50  # of 50 even stretches
    for number in range(MAX_CURVES + 40):
        store.add("a-1", 1, 0.0, reported(range(1), **{f"name-{number}": 1.0}))
    assert len(store.names("a-1")) == MAX_CURVES


def test_fewer_points_are_spread_evenly_and_end_with_the_last(store: CurveStore) -> None:
    store.add("a-1", 1, 0.0, reported(range(90)))
    assert store.read("a-1", "loss", most_points=3).steps == (29, 59, 89)
    assert len(store.read("a-1", "loss", most_points=90).steps) == 90


def test_a_job_that_is_removed_leaves_nothing(store: CurveStore, tmp_path: Path) -> None:
    store.add("a-1", 1, 0.0, reported(range(10)))
    store.add("b-1", 1, 0.0, reported(range(10)))
    store.remove("a-1")
    store.close()
    with sqlite3.connect(tmp_path / "curves.sqlite3") as database:
        assert database.execute("SELECT COUNT(*) FROM point").fetchone() == (10,)
        assert database.execute("SELECT job FROM curve").fetchall() == [("b-1",)]


def test_a_file_that_cannot_be_made_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="unable to open database file"):
        CurveStore(tmp_path / "gone" / "curves.sqlite3").add("a-1", 1, 0.0, reported(range(1)))


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


async def test_means_of_what_workers_report_are_served_as_curves(head: Controller) -> None:
    """1. Rank 0 reports, and so does another rank with a third of its samples. 2. Curves of their means are served,
    thinned where asked for. 3. A name that was never reported is refused with those that were. 4. They are gone with
    the job."""
    agent = await FakeAgent("a", devices=2).connect(head.address)
    job = await head.submit((2, 2))
    for rank in (0, 1):
        await agent.running(job, 1, rank)
        identity = common_pb2.WorkerId(job=job, run=1, rank=rank)
        metrics = reported(range(10), loss=1.0 + rank, accuracy=0.5)
        step = common_pb2.StepSample(step=9, local_batch=(30, 10)[rank], total_batch=40)
        worker = agents_pb2.WorkerTelemetry(id=identity, metrics=metrics, steps=[step])
        await agent.send(agents_pb2.AgentMessage(telemetry=agents_pb2.Telemetry(workers=[worker])))
    await agent.log((job, 1, 1), 0, b"written after the reports\n")  # kept in the order in which they came
    curves = [curve async for curve in head.stub.Curves(pb.CurvesRequest(job=job, most_points=2), timeout=CALL_S)]
    assert [(curve.name, list(curve.steps), list(curve.values)) for curve in curves] == [
        ("accuracy", [4, 9], [0.5, 0.5]),
        ("loss", [4, 9], [1.25, 1.25]),
    ]
    with pytest.raises(grpc.aio.AioRpcError, match="reports no 'los', but accuracy, loss") as refused:
        [_ async for _ in head.stub.Curves(pb.CurvesRequest(job=job, names=["los"]), timeout=CALL_S)]
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    for rank in (0, 1):
        await agent.end((job, 1, rank))
    async for seen in head.stub.Watch(pb.WatchRequest(job=job), timeout=CALL_S):
        ended = seen.phase
    assert ended == pb.PHASE_DONE
    await head.stub.Remove(pb.RemoveRequest(job=job), timeout=CALL_S)
    with pytest.raises(grpc.aio.AioRpcError, match="no job"):
        [_ async for _ in head.stub.Curves(pb.CurvesRequest(job=job), timeout=CALL_S)]
    await agent.disconnect()
