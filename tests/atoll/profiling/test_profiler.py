"""What is tried when: decided from what is on disk alone. And what a trial comes to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from profiles_made import BATCHES, empty, probe, with_trials

from atoll.errors import BadInput
from atoll.jobs.job_spec import Rule
from atoll.profiling import profiler
from atoll.profiling.document import BaselineTrial, ProbeTrial
from atoll.profiling.profiler import ProfileRequest
from atoll.profiling.trials import Command, StepLoss, Trial, WorkerReport


def test_baselines_of_the_middle_and_the_ends_come_first() -> None:
    document = empty()
    order = []
    while (trial := profiler.next_trial(document)) is not None and trial.sparsity is None:
        order.append(trial.batch)
        made = BaselineTrial(batch=trial.batch, loss=0.5, training_loss=0.5, seconds=1)
        document = document.model_copy(update={"baselines": (*document.baselines, made)})
    assert order[:3] == [16, 8, 32]
    assert trial is not None
    assert (trial.steps, trial.judged_steps) == (math.ceil(400 / trial.batch), math.ceil(80 / trial.batch))


def test_a_batch_is_probed_only_after_its_baseline() -> None:
    document = empty(wanted=40, batches=(8, 12, 16, 24, 32))
    first = with_trials(document).baselines
    document = document.model_copy(update={"baselines": first})
    probed = 0
    while (trial := profiler.next_trial(document)) is not None and probed < 8:
        known = {one.batch for one in document.baselines}
        if trial.sparsity is None:
            assert trial.batch not in known
            made = BaselineTrial(batch=trial.batch, loss=0.5, training_loss=0.5, seconds=1)
            document = document.model_copy(update={"baselines": (*document.baselines, made)})
        else:
            assert trial.batch in known
            probed += 1
            document = document.model_copy(update={"probes": (*document.probes, probe(trial.sparsity, trial.batch))})
    assert probed == 8


def test_nothing_is_left_when_all_probes_are_there_and_more_may_be_asked_for() -> None:
    document = with_trials(empty(wanted=2), probe(0.9, 8), probe(0.5, 32))
    assert profiler.next_trial(document) is None
    assert profiler.next_trial(document.model_copy(update={"wanted_probes": 3})) is not None


def told(losses: list[float], judged: list[float]) -> list[WorkerReport]:
    steps = [StepLoss(number, 4, loss) for number, loss in enumerate(losses)]
    behind = [StepLoss(len(losses) + number, 4, loss) for number, loss in enumerate(judged)]
    return [WorkerReport(prepared={}, steps=steps, judged=behind, ended=True)]


TRIAL = Trial(workers=2, steps=2, judged_steps=1, batch=8, sparsity=0.9)


def test_a_probe_is_worth_what_the_model_lost_on_what_followed() -> None:
    made = profiler.outcome(empty(), TRIAL, told([3.0, 1.0], [0.5, 0.7]), 2.0)
    assert isinstance(made, ProbeTrial)
    assert made.loss == pytest.approx(0.6)
    assert made.training_loss is not None
    assert 1.0 < made.training_loss < 3.0


@pytest.mark.parametrize(("losses", "judged"), [([1.0, math.nan], [1.0]), ([1.0, 2.0], [math.inf]), ([1.0, 1.0], [11])])
def test_a_probe_that_diverged_has_no_loss(losses: list[float], judged: list[float]) -> None:
    made = profiler.outcome(empty(), TRIAL, told(losses, judged), 2.0)
    assert isinstance(made, ProbeTrial)
    assert made.loss is None
    assert profiler.finished(with_trials(empty(wanted=1), made)).complete


def test_a_baseline_that_diverges_and_losses_below_zero_are_refused() -> None:
    with pytest.raises(BadInput, match="training diverged without any compression"):
        profiler.outcome(empty(), replace(TRIAL, sparsity=None), told([1.0, math.nan], [1.0]), 2.0)
    with pytest.raises(BadInput, match="only losses above 0 can be compared"):
        profiler.outcome(empty(), TRIAL, told([1.0, 0.5], [-0.5]), 2.0)


PREPARED = {
    "parameters": [["weight", [3, 4], "float32", True], ["bias", [3], "float32", False]],
    "samples": 1000,
    "batch": 64,
    "optimizer": {"kind": "SGD", "groups": [{"lr": 0.1, "parameters": 2}]},
}
WANTED = ProfileRequest(probes=3, workers=2, sampling="log-uniform", seed=0, settings={}, learning_rate="adascale")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    (tmp_path / "train.py").write_text("")
    return Command(script=tmp_path / "train.py", args=(), env={}, logs=tmp_path)


def test_what_is_not_asked_for_follows_the_script(command: Command) -> None:
    document = profiler.new_profile(PREPARED, command, WANTED)
    assert document.conditions.samples == 500
    assert (document.conditions.batches[0], document.conditions.batches[-1]) == (16, 50)
    assert (document.model.entries, document.model.tensors) == (12, 2)


@pytest.mark.parametrize("batches", [(1, 64), (64, 2000)])
def test_batches_that_cannot_be_are_refused(command: Command, batches: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="batches"):
        profiler.new_profile(PREPARED, command, replace(WANTED, batches=batches))


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 999},
        {"parameters": [["weight", [4, 3], "float32", True], ["bias", [3], "float32", False]]},
        {"optimizer": {"kind": "SGD", "groups": [{"lr": 0.2, "parameters": 2}]}},
    ],
    ids=["dataset", "shape", "learning rate"],
)
def test_a_profile_of_another_model_is_refused(command: Command, change: dict[str, object]) -> None:
    old = profiler.new_profile(PREPARED, command, replace(WANTED, samples=400, batches=(16, 64)))
    new = profiler.new_profile(PREPARED | change, command, replace(WANTED, samples=400, batches=(16, 64)))
    with pytest.raises(BadInput, match="of another model"):
        profiler.resumed(old, new, Path("p.json"))


def test_conditions_that_changed_are_named_and_a_changed_script_is_not_among_them(command: Command) -> None:
    old = profiler.new_profile(PREPARED, command, WANTED)
    with pytest.raises(BadInput, match="begun with samples = 500, not 300"):
        profiler.resumed(old, profiler.new_profile(PREPARED, command, replace(WANTED, samples=300)), Path("p.json"))
    command.script.write_text("# a remark")
    assert profiler.resumed(old, profiler.new_profile(PREPARED, command, WANTED), Path("p.json")) == old


def test_a_complete_profile_stays_until_more_probes_are_asked_for(command: Command) -> None:
    new = empty(wanted=1)
    old = profiler.finished(with_trials(new, probe(0.9, BATCHES[0])))
    assert profiler.resumed(old, new, Path("p.json")) is old
    more = profiler.resumed(old, empty(wanted=2), Path("p.json"))
    assert (more.complete, more.probes) == (False, old.probes)


@pytest.mark.parametrize(("rule", "factors"), [("adascale", (0.5, 2.0)), ("square-root", (0.5, 2.0)), ("none", (1, 1))])
def test_trials_train_with_the_learning_rate_that_the_job_will_have(
    rule: Rule, factors: tuple[float, float], tmp_path: Path
) -> None:
    """1. The script's own batch is 64; 16 and 256 are tried. 2. The job would halve and double the learning rate with
    them. 3. Trials kept the script's own, so the profile was of what no job trains: large batches looked worse."""
    script = tmp_path / "train.py"
    script.write_text("")
    prepared = {"parameters": [["w", [4], "float32", True]], "samples": 1000, "batch": 64, "optimizer": {"kind": "SGD"}}
    wanted = replace(WANTED, learning_rate=rule, batches=(16, 256))
    document = profiler.new_profile(prepared, Command(script=script, args=(), env={}, logs=tmp_path), wanted)
    found = {}
    while (trial := profiler.next_trial(document)) is not None and trial.sparsity is None:
        found[trial.batch] = trial.learning_rate_factor
        made = BaselineTrial(batch=trial.batch, loss=0.5, training_loss=0.5, seconds=1)
        document = document.model_copy(update={"baselines": (*document.baselines, made)})
    assert (found[16], found[256]) == factors
