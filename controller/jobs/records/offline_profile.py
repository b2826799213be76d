"""The offline profile that a job was submitted with, and whether it is of what the job trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from atoll.controller.planners.schemas import Schema, read
from atoll.controller.planners.surrogate import Surrogate
from atoll.network.message_limits import SHA256


class _ProfiledModel(Schema):
    fingerprint: Annotated[str, Field(pattern=f"^{SHA256.pattern}$")]
    words: Annotated[str, Field(max_length=500)]


class _ProfileDocument(Surrogate):
    """The file that `atoll profile` wrote; the first ones did not say of which model they are."""

    model: _ProfiledModel | None = None


@dataclass(frozen=True, slots=True)
class OfflineProfile:
    """fingerprint: of what was profiled; empty where the file does not say. words: the same for people."""

    surrogate: Surrogate
    fingerprint: str = ""
    words: str = ""

    def is_of(self, trained: str) -> bool:
        """Whether it may be used for a script that prepared `trained`; empty: not known, so nothing speaks against."""
        return not trained or not self.fingerprint or trained == self.fingerprint


@lru_cache(maxsize=64)
def offline_profile(text: str) -> OfflineProfile:
    """From JSON: a surrogate, and under "model" what it is of. Raises BadInput."""
    found = read(_ProfileDocument, text, "the offline profile", "Give the file that `atoll profile` wrote")
    surrogate = Surrogate(sparsities=found.sparsities, batches=found.batches, extra=found.extra)
    if found.model is None:
        return OfflineProfile(surrogate)
    return OfflineProfile(surrogate, found.model.fingerprint, found.model.words)
