"""A profile that was made of another model is not used, and the job says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from made import changed, clock, job, node, observed, profile, run, spec, worker

from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import ObservedJob
from atoll.controller.jobs.model.offline_profile import offline_profile
from atoll.controller.jobs.model.policy import policy_of
from atoll.controller.state.records import JobRecord, Level
from atoll.errors import BadInput
from atoll.jobs.job_spec import Adapt
from atoll.v1.agents_pb2 import Prepared, WorkerTelemetry
from atoll.v1.common_pb2 import WorkerId

ONE, OTHER = "a" * 64, "b" * 64
SURROGATE = {"sparsities": [0.9, 0.99], "batches": [64, 256], "extra": [[0.0, 0.1], [0.2, 0.3]]}
OF_ONE = json.dumps(SURROGATE | {"model": {"fingerprint": ONE, "words": "1,000 entries in 4 tensors, SGD"}})


def profiled(text: str = OF_ONE) -> JobRecord:
    return job(spec=spec(strategy="stale-sparse", adapt=Adapt(strategy_params=("sparsity",), profile=text)))


def view(record: JobRecord, trains: str) -> ObservedJob:
    nodes = node("a", {0: worker()}), node("b", {1: worker()})
    return observed(record, run("a", "b"), *nodes, profile=profile(1, 1), workload_fingerprint=trains, samples=60_000)


def test_a_profile_of_the_model_that_trains_is_used() -> None:
    step = next_step(view(profiled(), ONE), clock())
    assert (step.job.learned.workload_fingerprint, step.events) == (ONE, ())
    surrogate = policy_of(step.job, "stale-sparse").surrogate
    assert surrogate is not None
    assert surrogate.sparsities == (0.9, 0.99)


def test_a_profile_of_another_model_is_not_used_and_that_is_told_once() -> None:
    """1. The first report of what trains is another fingerprint. 2. A warning says both. 3. The next look says no more,
    and no later run of the job uses the profile either."""
    step = next_step(view(profiled(), OTHER), clock())
    [event] = step.events
    assert (event.level, event.kind) == (Level.WARNING, "PROFILE_REFUSED")
    assert event.text.startswith(
        "the offline profile is not used: it is of another model (1,000 entries in 4 tensors, SGD); this job trains "
        "1,000 entries on 60,000 samples. Names, shapes and the optimizer's settings count too."
    )
    assert "atoll profile train.py" in event.text
    assert policy_of(step.job, "stale-sparse").surrogate is None
    assert next_step(view(step.job, OTHER), clock()).events == ()
    assert policy_of(changed(step.job, run=2), "stale-sparse").surrogate is None


def test_a_profile_is_used_until_the_job_reports_its_model() -> None:
    assert policy_of(profiled(), "stale-sparse").surrogate is not None


def test_rank_0_says_what_trains() -> None:
    board = ProgressBoard()
    progress = board.begin(run("a", "b", job="vit-1"))
    for rank, fingerprint in ((0, ONE), (1, OTHER)):
        told = WorkerTelemetry(id=WorkerId(job="vit-1", run=1, rank=rank), prepared=Prepared(fingerprint=fingerprint))
        board.observe(told)
    assert progress.workload_fingerprint == ONE


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"fingerprint": "x", "words": ""},
            r"model.fingerprint = 'x' is wrong: .* match pattern .*\[0-9a-f\]\{64\}",
        ),
        (
            {"fingerprint": ONE, "words": "w" * 501},
            "model.words = .* is wrong: .* at most 500 characters",
        ),
        ({"fingerprint": ONE}, "field 'model.words' is missing"),
    ],
)
def test_what_a_profile_says_of_its_model_is_checked(model: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        offline_profile(json.dumps(SURROGATE | {"model": model}))


def test_how_large_the_state_is_is_learned_with_what_is_trained_and_told_nobody() -> None:
    """The next run's placement knows it then."""
    seen = view(profiled(), ONE)
    step = next_step(replace(seen, training=replace(seen.training, state_bytes=(7_000, 300))), clock())
    assert (step.job.learned.shared_bytes, step.job.learned.own_bytes, step.events) == (7_000, 300, ())
