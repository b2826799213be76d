"""Profiles as `atoll profile` writes them."""

from __future__ import annotations

from atoll.profiling.document import BaselineTrial, Conditions, Document, ProbeTrial, ProfiledModel

BATCHES = (8, 16, 32)


def empty(wanted: int = 3, fingerprint: str = "a" * 64, **conditions: object) -> Document:
    given = {
        "script": "train.py", "script_sha256": "b" * 64, "workers": 2, "samples": 400, "batches": BATCHES,
        "sampling": "log-uniform", "seed": 0, "strategy": "stale-sparse", "settings": {},
    }  # fmt: skip
    return Document(
        model=ProfiledModel(fingerprint=fingerprint, tensors=4, entries=1000, samples=800, optimizer="SGD"),
        conditions=Conditions.model_validate({**given, **conditions}),
        reference_batch=16,
        wanted_probes=wanted,
    )


def with_trials(document: Document, *probes: ProbeTrial) -> Document:
    """All baselines are there."""
    baselines = tuple(BaselineTrial(batch=batch, loss=0.5, training_loss=0.6, seconds=1.0) for batch in BATCHES)
    return document.model_copy(update={"baselines": baselines, "probes": probes})


def probe(sparsity: float, batch: int, loss: float | None = 0.55) -> ProbeTrial:
    return ProbeTrial(sparsity=sparsity, batch=batch, loss=loss, training_loss=loss, seconds=1.0)
