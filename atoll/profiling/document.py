"""Profile file: JSON of the model, the trials and their results. Needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.agent.runtime.checkpoints.disk.disk_errors import replace_file
from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.errors import BadInput
from atoll.host.documents import read_document

MAX_BYTES: Final = 256 * 1024
"""Bytes of a profile that a job may carry."""
MAX_PROBES: Final = 1000

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, lt=2**40)]
_Loss = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Sparsity = Annotated[float, Field(ge=0, lt=1)]


class _ProfilePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfiledModel(_ProfilePart):
    """Model that was trained. `fingerprint` is equal exactly where these are: parameters (names, shapes, dtypes),
    the dataset's length, and the optimizer's kind and settings."""

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tensors: _Count
    entries: _Count
    """Trained parameters."""
    samples: _Count
    """Samples of the dataset."""
    optimizer: Annotated[str, Field(max_length=256)]

    @property
    def in_words(self) -> str:
        return f"{self.entries:,} entries in {self.tensors} tensors, {self.optimizer}, {self.samples:,} samples"


class Conditions(_ProfilePart):
    """Conditions of all trials of a profile."""

    script: Annotated[str, Field(max_length=4096)]
    script_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    args: tuple[str, ...] = ()
    workers: _Count
    samples: _Count
    """Samples trained in each trial."""
    batches: Annotated[tuple[_Count, ...], Field(min_length=1, max_length=64)]
    """Total batches that are tried, ascending."""
    sampling: Literal["log-uniform", "uniform"]
    """Distribution of the sparsities that are tried."""
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    strategy: str
    settings: dict[str, str | bool | int | float]
    """The job's settings of the strategy, beside those that trials choose."""
    learning_rate: Literal["none", "square-root"] = "none"
    """Learning rate of other batches: as the script sets it, or that times the root of the batch over `own_batch`."""
    own_batch: _Count | None = None
    """The script's own total batch."""

    def learning_rate_factor(self, batch: int) -> float:
        """Return the factor for trials with this total batch."""
        return math.sqrt(batch / self.own_batch) if self.learning_rate != "none" and self.own_batch else 1.0


class BaselineTrial(_ProfilePart):
    """Trial with neither compression nor staleness. loss: of the final model, on samples that follow. training_loss:
    smoothed, at the end."""

    batch: _Count
    loss: _Loss
    training_loss: _Number
    seconds: _Number


class ProbeTrial(_ProfilePart):
    """Trial with both; losses as a baseline's, None where training diverged."""

    sparsity: _Sparsity
    batch: _Count
    loss: _Loss | None
    training_loss: _Number | None
    seconds: _Number


class Document(_ProfilePart):
    """Whole profile. surrogate: against the baseline at `reference_batch`, for planner `tta`. compression: against the
    baseline at the same batch, so the cost of sparsity and staleness alone. error: standard error of both, relative to
    1 + extra."""

    kind: Literal["atoll-profile"] = "atoll-profile"
    version: Literal[1] = 1
    model: ProfiledModel
    conditions: Conditions
    reference_batch: _Count
    wanted_probes: Annotated[int, Field(ge=1, le=MAX_PROBES)]
    baselines: tuple[BaselineTrial, ...] = ()
    probes: tuple[ProbeTrial, ...] = ()
    surrogate: Surrogate | None = None
    compression: Surrogate | None = None
    error: tuple[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], ...] | None = None

    @property
    def complete(self) -> bool:
        return self.surrogate is not None


def load_profile(path: Path) -> dict[str, Any]:
    """Return a complete profile as JSON data for a job to carry; planner `tta` takes its `surrogate`.

    Raises NotFound, and BadInput for a file that is no profile or is not complete yet."""
    document = read(path)
    if not document.complete:
        raise BadInput(
            f"profile {path} has {len(document.probes)} of {document.wanted_probes} probes. Run the same "
            "`atoll profile` again: it goes on where it stopped"
        )
    found: dict[str, Any] = document.model_dump(mode="json")
    return found


def read(path: Path) -> Document:
    """Read a profile, complete or not. Raises NotFound or BadInput naming file and field."""
    absent, large = "`atoll profile train.py` makes one", "Was it made by `atoll profile`?"
    content = read_document("profile", path, MAX_BYTES, absent=absent, large=large)
    try:
        return Document.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "as a whole"
        raise BadInput(
            f"profile {path}, {where}: {first['msg']}. Make it anew: atoll profile train.py --out FILE"
        ) from error


def write(document: Document, path: Path) -> None:
    """Replace the file as a whole, so that an interruption leaves the one before."""
    text = json.dumps(document.model_dump(mode="json"), indent=1, allow_nan=False)
    replace_file(path, f"{text}\n".encode())
