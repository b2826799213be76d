"""Describes the profile that is asked for, new or as the one on disk goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from atoll.errors import BadInput
from atoll.jobs.job_spec import Rule
from atoll.profiling import surrogate, trials
from atoll.profiling.document import Conditions, Document, ProfiledModel
from atoll.profiling.trials import Command

OWN_BATCH_FACTOR: Final = 4
"""How far below and above the script's own batch is tried where nothing else is asked."""
STEPS_AT_LEAST: Final = 10
"""Of a trial with the largest batch that is chosen without being asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What the user asked for. learning_rate: the job's rule; of "adascale" a job knows nothing better with
    `stale-sparse` than the root, so trials take that. None: as the script's own batch and dataset suggest."""

    probes: int
    workers: int
    sampling: Literal["log-uniform", "uniform"]
    seed: int
    stale_sparse: Mapping[str, str | bool | int | float]
    learning_rate: Rule
    samples: int | None = None
    batches: tuple[int, int] | None = None


def new_profile(prepared: Mapping[str, Any], command: Command, wanted: ProfileRequest) -> Document:
    """A profile without trials. prepared: what the script told. Raises BadInput for batches that it cannot have."""
    model = ProfiledModel(**trials.description_of(prepared))
    samples = wanted.samples if wanted.samples is not None else max(1, model.samples // 2)
    low, high = wanted.batches or _around(prepared["batch"], wanted.workers, samples, model.samples)
    if low < wanted.workers:
        raise BadInput(f"batches {low}:{high} begin below the number of workers, {wanted.workers}. Begin them there")
    if high > model.samples:
        raise BadInput(f"batches {low}:{high} end above the dataset's {model.samples} samples. End them there")
    batches = surrogate.candidate_batches(low, high)
    return Document(
        model=model,
        conditions=Conditions(
            script=command.script.name,
            script_sha256=sha256(command.script.read_bytes()).hexdigest(),
            args=command.args,
            workers=wanted.workers,
            samples=samples,
            batches=batches,
            sampling=wanted.sampling,
            seed=wanted.seed,
            stale_sparse=dict(wanted.stale_sparse),
            learning_rate="none" if wanted.learning_rate == "none" else "square-root",
            own_batch=prepared["batch"],
        ),
        reference_batch=surrogate.reference_batch(batches),
        wanted_probes=wanted.probes,
    )


def _around(own: int, workers: int, samples: int, dataset: int) -> tuple[int, int]:
    low = max(workers, own // OWN_BATCH_FACTOR)
    return low, max(low, min(own * OWN_BATCH_FACTOR, samples // STEPS_AT_LEAST, dataset))


def resumed(old: Document, new: Document, path: Path) -> Document:
    """`old`, to be completed as `new` asks. Raises BadInput where it is of another model or made otherwise."""
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
