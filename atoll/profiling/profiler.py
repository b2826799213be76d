"""Profiler: begins or resumes a profile, chooses the next trial and runs it.

Each trial is written to the profile before the next one begins."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from atoll.errors import BadInput
from atoll.jobs.job_spec import Rule
from atoll.profiling import surrogate, trials
from atoll.profiling.document import BaselineTrial, Conditions, Document, ProbeTrial, ProfiledModel, write
from atoll.profiling.trials import Command, Trial, WorkerReport
from atoll.strategies import registry

JUDGED_SHARE: Final = 0.2
"""Samples with which the model is judged, for each that it was trained on."""
OWN_BATCH_FACTOR: Final = 4
"""Ratio of the largest batch to the script's own, and of that to the smallest, where no batches are asked for."""
MIN_STEPS: Final = 10
"""Steps of a trial with the largest batch that is not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Request of a user. samples, batches: None: as the script's own batch and dataset suggest. learning_rate: the
    job's rule; trials take the root for "adascale", as its jobs do."""

    probes: int
    workers: int
    sampling: Literal["log-uniform", "uniform"]
    seed: int
    settings: Mapping[str, str | bool | int | float]
    learning_rate: Rule
    samples: int | None = None
    batches: tuple[int, int] | None = None


def prepared_by(command: Command, workers: int) -> Mapping[str, Any]:
    """Start the script up to run.prepare and return what it prepares. Raises as `trials.run`."""
    with tempfile.TemporaryDirectory(prefix="atoll-profile-") as folder:
        reports = trials.run(command, Trial(workers=workers), Path(folder), lambda _: None)
    assert reports[0].prepared is not None  # `trials.run` saw to it
    return reports[0].prepared


def new_profile(prepared: Mapping[str, Any], command: Command, wanted: ProfileRequest) -> Document:
    """Return a profile without trials. prepared: by the script. Raises BadInput for batches that it cannot have."""
    model = ProfiledModel(**trials.description_of(prepared))
    own, workers = prepared["batch"], wanted.workers
    samples = wanted.samples if wanted.samples is not None else max(1, model.samples // 2)
    low = max(workers, own // OWN_BATCH_FACTOR)
    high = max(low, min(own * OWN_BATCH_FACTOR, samples // MIN_STEPS, model.samples))
    low, high = wanted.batches or (low, high)
    if low < workers:
        raise BadInput(f"batches {low}:{high} begin below the number of workers, {workers}. Begin them there")
    if high > model.samples:
        raise BadInput(f"batches {low}:{high} end above the dataset's {model.samples} samples. End them there")
    batches = surrogate.candidate_batches(low, high)
    return Document(
        model=model,
        conditions=Conditions(
            script=command.script.name,
            script_sha256=sha256(command.script.read_bytes()).hexdigest(),
            args=command.args,
            workers=workers,
            samples=samples,
            batches=batches,
            sampling=wanted.sampling,
            seed=wanted.seed,
            strategy=registry.profiled().name,
            settings=dict(wanted.settings),
            learning_rate="none" if wanted.learning_rate == "none" else "square-root",
            own_batch=own,
        ),
        reference_batch=surrogate.reference_batch(batches),
        wanted_probes=wanted.probes,
    )


def resumed(old: Document, new: Document, path: Path) -> Document:
    """Return `old`, to be completed as `new`. Raises BadInput for another model or other conditions."""
    another = f"Name another --out, or remove {path}"
    if old.model.fingerprint != new.model.fingerprint:
        raise BadInput(
            f"profile {path} is of another model: {old.model.in_words}; this script prepares {new.model.in_words}. "
            f"Names, shapes and the optimizer's settings count too. {another}"
        )
    for field in Conditions.model_fields:
        before, now = getattr(old.conditions, field), getattr(new.conditions, field)
        if before != now and field not in {"script", "script_sha256"}:  # it is the model that counts
            raise BadInput(f"profile {path} was begun with {field} = {before!r}, not {now!r}. {another}")
    if old.complete and len(old.probes) >= new.wanted_probes:
        return old
    changes = {"wanted_probes": new.wanted_probes, "surrogate": None, "compression": None, "error": None}
    return old.model_copy(update=changes)


def run_trials(
    document: Document, path: Path, command: Command, progress: Callable[[Trial, int], None]
) -> Iterator[tuple[Document, BaselineTrial | ProbeTrial]]:
    """Run the missing trials one after the other; yield the profile, as written to `path`, and its newest trial.

    progress: called with the trial and its finished steps. Raises as `trials.run`, and BadInput for losses that cannot
    be compared."""
    while (trial := next_trial(document)) is not None:
        progress(trial, 0)
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="atoll-profile-") as folder:
            reports = trials.run(command, trial, Path(folder), partial(progress, trial))
        _check_model(document, reports, command)
        made = outcome(document, trial, reports, time.monotonic() - began_s)
        kind = "baselines" if isinstance(made, BaselineTrial) else "probes"
        document = document.model_copy(update={kind: (*getattr(document, kind), made)})
        write(document, path)
        yield document, made


def next_trial(document: Document) -> Trial | None:
    """Return the next trial; None where nothing is missing. The same trials again give the same answer."""
    conditions, number = document.conditions, len(document.probes)
    known = {one.batch for one in document.baselines}
    for batch in surrogate.first_baselines(conditions.batches):
        if batch not in known:
            return _trial(conditions, batch, None)
    if number >= document.wanted_probes:
        return None
    sparsity = surrogate.draw_sparsity(number, conditions.sampling, conditions.seed)
    batch = surrogate.choose_batch(sparsity, tried(document), conditions.batches, _small(conditions.seed))
    return _trial(conditions, batch, sparsity if batch in known else None)


def _trial(conditions: Conditions, batch: int, sparsity: float | None) -> Trial:
    return Trial(
        workers=conditions.workers,
        steps=math.ceil(conditions.samples / batch),
        judged_steps=math.ceil(conditions.samples * JUDGED_SHARE / batch),
        batch=batch,
        sparsity=sparsity,
        strategy=conditions.strategy,
        settings=conditions.settings,
        seed=conditions.seed,
        learning_rate_factor=conditions.learning_rate_factor(batch),
    )


def outcome(
    document: Document, trial: Trial, reports: Sequence[WorkerReport], seconds: float
) -> BaselineTrial | ProbeTrial:
    """Return the trial's numbers. Raises BadInput for a loss that is not above 0, and for a baseline that diverged."""
    trained = trials.whole_batches(one.steps for one in reports)
    training = trials.smoothed(trained, document.reference_batch)
    loss = trials.mean(trials.whole_batches(one.judged for one in reports))
    bound = surrogate.MAX_RATIO * abs(trained[0][1])
    diverged = not (loss < bound and training < bound)  # NaN too
    if not diverged and loss <= 0:
        raise BadInput(
            f"the loss came to {loss:g} ({trial}); only losses above 0 can be compared by their ratio. Let the script "
            "add a constant to it"
        )
    took = round(seconds, 3)
    if trial.sparsity is not None:
        known = {"loss": None, "training_loss": None} if diverged else {"loss": loss, "training_loss": training}
        return ProbeTrial(sparsity=trial.sparsity, batch=trial.batch, seconds=took, **known)
    if diverged:
        raise BadInput(f"training diverged without any compression ({trial}). Narrow --batch, or repair the script")
    return BaselineTrial(batch=trial.batch, loss=loss, training_loss=training, seconds=took)


def tried(document: Document) -> list[surrogate.Tried]:
    """Return each probe relative to the baseline of its batch."""
    loss = {one.batch: one.loss for one in document.baselines}
    return [
        surrogate.Tried(one.sparsity, one.batch, math.nan if one.loss is None else one.loss / loss[one.batch])
        for one in document.probes
    ]


def finished(document: Document) -> Document:
    """Return the document with the surrogate on its grid. document: no trial is missing."""
    conditions = document.conditions
    fitted = surrogate.fit(
        tried(document),
        {one.batch: one.loss for one in document.baselines},
        conditions.batches,
        sampling=conditions.sampling,
        seed=_small(conditions.seed),
    )
    return document.model_copy(update=fitted._asdict())


def _small(seed: int) -> int:
    return seed % 2**32  # numpy's older generators, which the Gaussian process uses, take no more


def _check_model(document: Document, reports: Sequence[WorkerReport], command: Command) -> None:
    for one in reports:
        assert one.prepared is not None  # `trials.run` saw to it
        if trials.description_of(one.prepared)["fingerprint"] != document.model.fingerprint:
            raise BadInput(
                f"{command.script} prepared another model or optimizer than in the trials before. Was it changed "
                "meanwhile? Name another --out"
            )
