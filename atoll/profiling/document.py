"""The profile as a file: JSON that says of what model it is, what was tried, and what came out. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.errors import BadInput
from atoll.host.documents import read_document

MAX_BYTES: Final = 256 * 1024  # what a job may carry
MAX_PROBES: Final = 1000

_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, lt=2**40)]
_Loss = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Sparsity = Annotated[float, Field(ge=0, lt=1)]
_Extra = Annotated[float, Field(ge=-0.999, le=1e6)]


class _ProfilePart(BaseModel):
    """Names that a file has otherwise than the code are those of its first version: files stay readable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfiledModel(_ProfilePart):
    """What was trained. `fingerprint` is equal exactly where parameters (names, shapes, dtypes), the dataset's length
    and the optimizer's kind and settings are."""

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    tensors: _Count
    entries: _Count
    """Trained ones."""
    samples: _Count
    """In the dataset."""
    optimizer: Annotated[str, Field(max_length=256)]

    @property
    def in_words(self) -> str:
        return f"{self.entries:,} entries in {self.tensors} tensors, {self.optimizer}, {self.samples:,} samples"


class Conditions(_ProfilePart):
    """Under which all trials of a profile ran."""

    script: Annotated[str, Field(max_length=4096)]
    script_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    args: tuple[str, ...] = ()
    workers: _Count
    samples: _Count
    """Trained in each trial."""
    batches: Annotated[tuple[_Count, ...], Field(min_length=1, max_length=64)]
    """Total batches that are tried, ascending."""
    sampling: Literal["log-uniform", "uniform"]
    """Of sparsities."""
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    stale_sparse: dict[str, str | bool | int | float]
    """The job's settings beside sparsity and staleness."""
    learning_rate: Literal["none", "square-root"] = "none"
    """With the batch: as the script sets it, or that times the root of the batch over `own_batch`."""
    own_batch: _Count | None = None
    """The script's own, of the whole job."""

    def learning_rate_factor(self, batch: int) -> float:
        """Of trials with this total batch."""
        return math.sqrt(batch / self.own_batch) if self.learning_rate != "none" and self.own_batch else 1.0


class BaselineTrial(_ProfilePart):
    """A trial with neither compression nor staleness. loss: of the model that it ended with, on samples that follow.
    training_loss: smoothed, at the end."""

    batch: _Count
    loss: _Loss
    training_loss: _Number
    seconds: _Number


class ProbeTrial(_ProfilePart):
    """A trial with both; losses as a baseline's, None where training diverged."""

    sparsity: _Sparsity
    batch: _Count
    loss: _Loss | None
    training_loss: _Number | None
    seconds: _Number


class Grid(_ProfilePart):
    """extra[i][j]: relative extra loss at sparsities[i] and batches[j], as planner `tta` takes it."""

    sparsities: tuple[_Sparsity, ...]
    batches: tuple[_Count, ...]
    extra: tuple[tuple[_Extra, ...], ...]

    @model_validator(mode="after")
    def _is_a_grid(self) -> Grid:
        for name, knots in (("sparsities", self.sparsities), ("batches", self.batches)):
            if list(knots) != sorted(set(knots)) or not knots:
                raise ValueError(f"{name} must be ascending and not empty")
        if len(self.extra) != len(self.sparsities) or any(len(row) != len(self.batches) for row in self.extra):
            raise ValueError("extra must have a row for each sparsity and a value for each batch")
        return self


class Document(_ProfilePart):
    """surrogate: against the baseline at `reference_batch`, for planner `tta`. compression: against the baseline at the
    same batch, so what sparsity and staleness alone cost. error: standard error of both, relative to 1 + extra."""

    kind: Literal["atoll-profile"] = "atoll-profile"
    version: Literal[1] = 1
    model: ProfiledModel
    conditions: Conditions
    reference_batch: _Count
    wanted_probes: Annotated[int, Field(ge=1, le=MAX_PROBES)]
    baselines: tuple[BaselineTrial, ...] = ()
    probes: tuple[ProbeTrial, ...] = ()
    surrogate: Grid | None = None
    compression: Grid | None = None
    error: tuple[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], ...] | None = None

    @property
    def complete(self) -> bool:
        return self.surrogate is not None


def load_profile(path: Path) -> dict[str, Any]:
    """A complete profile as JSON data, checked, for a job to carry; `surrogate` in it is what planner `tta` takes.

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
    """Raises NotFound or BadInput naming file and field."""
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
    """All of it or nothing: whoever is interrupted goes on from the file that was there before."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            json.dump(document.model_dump(mode="json"), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # a temporary file is nobody else's to read
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
