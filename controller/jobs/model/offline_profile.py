"""Offline profile of a job: its surrogate, and the model that it was measured with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.errors import BadInput
from atoll.jobs import job_spec
from atoll.network.message_limits import SHA256
from atoll.planning.schemas import Schema, read
from atoll.v1 import common_pb2 as pb


class _ProfiledModel(Schema):
    fingerprint: Annotated[str, Field(pattern=f"^{SHA256.pattern}$")]
    words: Annotated[str, Field(max_length=500)]


class _ProfileDocument(Surrogate):
    """The surrogate of a file that `atoll profile` wrote, and its model."""

    model: _ProfiledModel


@dataclass(frozen=True, slots=True)
class OfflineProfile:
    """fingerprint: of the profiled model. words: its description for people."""

    surrogate: Surrogate
    fingerprint: str
    words: str

    def is_of(self, trained: str) -> bool:
        """Return whether the profile suits a script that prepared `trained`, empty if that is not known yet."""
        return not trained or trained == self.fingerprint


@lru_cache(maxsize=64)
def offline_profile(text: str) -> OfflineProfile:
    """Read JSON: a surrogate, and under "model" the profiled model. Raises BadInput."""
    found = read(_ProfileDocument, text, "the offline profile", "Give the file that `atoll profile` wrote")
    surrogate = Surrogate(sparsities=found.sparsities, batches=found.batches, extra=found.extra)
    return OfflineProfile(surrogate, found.model.fingerprint, found.model.words)


def spec_from_wire(wire: pb.JobSpec) -> job_spec.JobSpec:
    """Check a client's spec in full, its offline profile too. Raises BadInput naming the first wrong field."""
    spec = job_spec.from_wire(wire)
    if spec.adapt.profile:
        try:
            offline_profile(spec.adapt.profile)
        except BadInput as error:
            raise BadInput(f"spec.adapt.profile: {error}") from error
    return spec
