"""Chooses the next trial and runs it, until the profile is complete. Every trial is on disk before the next one."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from atoll.errors import BadInput
from atoll.profiling import losses, surrogate, trials
from atoll.profiling.document import BaselineTrial, Document, Grid, ProbeTrial, write
from atoll.profiling.trials import Command, Told, Trial

JUDGED_SHARE: Final = 0.2
"""Samples that the model is judged by, for each that it was trained on."""


class Watcher(Protocol):
    """Whoever shows how far it is."""

    def began(self, document: Document, trial: Trial) -> None: ...

    def stepped(self, steps: int) -> None: ...

    def ended(self, document: Document, made: BaselineTrial | ProbeTrial) -> None: ...


def look(command: Command, workers: int) -> Mapping[str, Any]:
    """What the script prepares, by starting it up to run.prepare. Raises as `trials.run`."""
    with tempfile.TemporaryDirectory(prefix="atoll-profile-") as folder:
        told = trials.run(command, Trial(workers=workers), Path(folder), lambda _: None)
    assert told[0].prepared is not None  # `trials.run` saw to it
    return told[0].prepared


def profile(document: Document, path: Path, command: Command, watcher: Watcher) -> Document:
    """Run what is missing, one trial after the other, and write the finished profile to `path`. Raises as
    `trials.run`, and BadInput for losses that cannot be compared."""
    while (trial := next_trial(document)) is not None:
        watcher.began(document, trial)
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="atoll-profile-") as folder:
            told = trials.run(command, trial, Path(folder), watcher.stepped)
        _check_model(document, told, command)
        made = outcome(document, trial, told, time.monotonic() - began_s)
        document = document.model_copy(update=_added(document, made))
        write(document, path)
        watcher.ended(document, made)
    document = finished(document)
    write(document, path)
    return document


def next_trial(document: Document) -> Trial | None:
    """None where nothing is missing. The same trials again give the same answer."""
    known = {one.batch for one in document.baselines}
    batches = document.conditions.batches
    for batch in surrogate.first_baselines(batches):
        if batch not in known:
            return _trial(document, batch, None)
    number = len(document.probes)
    if number >= document.wanted_probes:
        return None
    sparsity = surrogate.draw_sparsity(number, document.conditions.sampling, document.conditions.seed)
    batch = surrogate.choose_batch(sparsity, tried(document), batches, _small(document.conditions.seed))
    return _trial(document, batch, sparsity if batch in known else None)


def _trial(document: Document, batch: int, sparsity: float | None) -> Trial:
    conditions = document.conditions
    return Trial(
        workers=conditions.workers,
        steps=math.ceil(conditions.samples / batch),
        judged_steps=math.ceil(conditions.samples * JUDGED_SHARE / batch),
        batch=batch,
        sparsity=sparsity,
        stale_sparse=conditions.stale_sparse,
        seed=conditions.seed,
        learning_rate_factor=conditions.learning_rate_factor(batch),
    )


def outcome(document: Document, trial: Trial, told: Sequence[Told], seconds: float) -> BaselineTrial | ProbeTrial:
    """The trial in numbers. Raises BadInput for a loss that is not above 0, and for a baseline that diverged."""
    trained = losses.whole_batches([one.steps for one in told])
    training = losses.smoothed(trained, document.reference_batch)
    loss = losses.mean(losses.whole_batches([one.judged for one in told]))
    bound = surrogate.MAX_RATIO * abs(trained[0][1])
    diverged = not (loss < bound and training < bound)  # NaN too
    if not diverged and loss <= 0:
        raise BadInput(
            f"the loss came to {loss:g} ({trial}); only losses above 0 can be compared by their ratio. Let the script "
            "add a constant to it"
        )
    if trial.sparsity is None:
        if diverged:
            raise BadInput(f"training diverged without any compression ({trial}). Narrow --batch, or repair the script")
        return BaselineTrial(batch=trial.batch, loss=loss, training_loss=training, seconds=round(seconds, 3))
    return ProbeTrial(
        sparsity=trial.sparsity,
        batch=trial.batch,
        loss=None if diverged else loss,
        training_loss=None if diverged else training,
        seconds=round(seconds, 3),
    )


def tried(document: Document) -> list[surrogate.Tried]:
    """Each probe against the baseline of its batch."""
    loss = {one.batch: one.loss for one in document.baselines}
    return [
        surrogate.Tried(one.sparsity, one.batch, math.nan if one.loss is None else one.loss / loss[one.batch])
        for one in document.probes
    ]


def finished(document: Document) -> Document:
    """With the surrogate on its grid. document: no trial is missing."""
    conditions = document.conditions
    fitted = surrogate.fit(
        tried(document),
        {one.batch: one.loss for one in document.baselines},
        conditions.batches,
        sampling=conditions.sampling,
        seed=_small(conditions.seed),
    )
    grids = [
        Grid(sparsities=fitted.sparsities, batches=fitted.batches, extra=_rounded(values))
        for values in (fitted.extra, fitted.compression)
    ]
    return document.model_copy(update={"surrogate": grids[0], "compression": grids[1], "error": _rounded(fitted.error)})


def _rounded(values: surrogate.F64) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(f"{value:.5g}") for value in row) for row in values)


def _small(seed: int) -> int:
    return seed % 2**32  # what numpy's older generators, which the Gaussian process uses, take


def _added(document: Document, made: BaselineTrial | ProbeTrial) -> dict[str, object]:
    if isinstance(made, BaselineTrial):
        return {"baselines": (*document.baselines, made)}
    return {"probes": (*document.probes, made)}


def _check_model(document: Document, told: Sequence[Told], command: Command) -> None:
    for one in told:
        assert one.prepared is not None  # `trials.run` saw to it
        found = trials.description_of(one.prepared)["fingerprint"]
        if found != document.model.fingerprint:
            raise BadInput(
                f"{command.script} prepared another model or optimizer than in the trials before. Was it changed "
                "meanwhile? Name another --out"
            )
