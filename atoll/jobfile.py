"""What a job may say: the TOML job file and the command's flags, checked before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from atoll.documents import line_of, read_toml, unknown_field, wrong_value
from atoll.errors import BadInput
from atoll.profiling.document import ProfiledModel, load_profile

if TYPE_CHECKING:
    from atoll.v1.common_pb2 import Adaptation, JobSpec, StaleSparse

MAX_WORKERS: Final = 4096
_MAX_JOB_FILE_BYTES: Final = 1024 * 1024
_MAX_PROFILE_BYTES: Final = 256 * 1024
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#]+")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
Split = Literal["auto", "inverse-time", "even"]
Strategy = Literal["dense", "stale-sparse"]

_Text = Annotated[StrictStr, Field(max_length=4096)]
_Count = Annotated[StrictInt, Field(ge=0, lt=2**32)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSection(_Strict):
    """`[checkpoint]`: where and how often the model is saved."""

    directory: _Text = ""
    """Absolute path on the nodes, or the URL of an object store, e.g. s3://bucket/vit, which is kept level with the
    agent's own folder for the job; empty = that folder alone."""

    every_steps: _Count = 200
    """Steps between checkpoints; 0 = only at the end."""

    keep: Annotated[StrictInt, Field(ge=1, lt=2**32)] = 2
    """Complete checkpoints kept."""

    keep_every_steps: _Count = 0
    """The first checkpoint at or after each multiple of this stays for good; 0 = none."""

    memory_replicas: Annotated[StrictInt, Field(ge=0, le=8)] = 2
    """Machines that hold each part of the state in their memory as well; 1 = its own alone, 0 = none."""

    site_safe: StrictBool = False
    """Those machines in different islands: slower, but the loss of an island loses nothing."""

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/") and not _URL.fullmatch(value):
            raise ValueError(
                "must be an absolute path, for the nodes have other working folders, or a URL like s3://bucket/folder"
            )
        return value


class StaleSparseSection(_Strict):
    """`[stale_sparse]`: how strategy stale-sparse trains. What is left out has the controller's default."""

    rate: Annotated[StrictFloat | StrictInt | None, Field(ge=0, le=0.9999)] = None
    """Share of the entries that a step leaves behind; 0.99 where left out."""

    staleness: Annotated[StrictInt | None, Field(ge=0, le=1)] = None
    """0: every step waits for the one before; 1 (where left out): for the one before that."""

    selection: Literal["threshold", "topk", "random"] | None = None
    values: Literal["float16", "bfloat16", "float32"] | None = None
    error_feedback: StrictBool = True
    """Whether what was not sent is added to the next step's gradient."""

    exchange: Literal["updates", "gradients"] | None = None
    momentum: Literal["lazy", "as-is"] | None = None
    scheduling: Literal["edf", "fcfs"] | None = None
    digest_every: Annotated[StrictInt | None, Field(ge=1, lt=2**32)] = None
    """Steps between comparisons of all workers' weights; 100 where left out."""


class AdaptSection(_Strict):
    """`[adapt]`: what the controller may decide beside the split of the batch."""

    batch: Annotated[tuple[_Count, _Count] | None, Field()] = None
    """Least and largest total batch; the script's own stays where left out."""

    learning_rate: Literal["adascale", "square-root", "none"] = "adascale"
    """What happens to the learning rate with the total batch."""

    rate: StrictBool = False
    """Whether the compression rate follows the links (strategy stale-sparse)."""

    profile: Annotated[StrictStr, Field(max_length=_MAX_PROFILE_BYTES)] | None = None
    """File that `atoll profile` wrote: what compression and batch cost this model. Its surrogate once it was read."""

    @field_validator("batch")
    @classmethod
    def _batch(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 1 <= value[0] <= value[1]:
            raise ValueError("must be the least and the largest total batch, e.g. [128, 1024]")
        return value


class JobFile(_Strict):
    """A job as its user describes it. Relative paths are relative to the job file."""

    name: _Text | None = None
    script: _Text | None = None
    args: Annotated[tuple[_Text, ...], Field(max_length=256)] = ()
    workers: StrictInt | StrictStr = 1
    standby: Annotated[StrictInt, Field(ge=0, le=MAX_WORKERS)] = 0
    """Free devices beyond `workers` that no other job gets, to take the places of lost ones at once."""

    env: Annotated[dict[StrictStr, _Text], Field(max_length=256)] = {}
    workdir: _Text | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    max_restarts: _Count = 3
    split: Split = "auto"
    seed: Annotated[StrictInt, Field(ge=0, lt=2**64)] = 0
    stall_timeout_s: Annotated[StrictFloat | StrictInt, Field(ge=0, le=86_400)] = 0
    hang_s: Annotated[StrictFloat | StrictInt, Field(ge=0, le=604_800)] = 0
    """A worker that completes no step for this long is stopped and its run tried again; 0: it is only told of. Longer
    than the longest evaluation, and than what comes before the first step."""

    strategy: Strategy = "dense"
    stale_sparse: StaleSparseSection | None = None
    adapt: AdaptSection = AdaptSection()

    @field_validator("name")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 40 of a-z, 0-9 and '-', not starting with '-'")
        return value

    @field_validator("workers")
    @classmethod
    def _workers(cls, value: int | str) -> int | str:
        parse_workers(str(value))
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for key in value:
            if not key or "=" in key or "\0" in key or "\0" in value[key]:
                raise ValueError(f"{key!r} cannot be the name of an environment variable")
        return value

    @model_validator(mode="after")
    def _sections_fit(self) -> JobFile:
        if self.stale_sparse is not None and self.strategy != "stale-sparse":
            raise ValueError(
                f"strategy = '{self.strategy}' takes no stale_sparse settings. "
                "Leave them out, or say strategy = 'stale-sparse'"
            )
        return self

    def to_spec(self, script: str) -> JobSpec:
        """The message that is sent. script: its path inside the bundle. Raises BadInput."""
        from atoll.v1.common_pb2 import CheckpointPolicy, JobSpec

        if self.adapt.rate and self.strategy != "stale-sparse":  # not before: the strategy may be a flag
            raise BadInput(
                f"adapt.rate = true: strategy = '{self.strategy}' has no compression rate to adapt. "
                "Leave it out, or say strategy = 'stale-sparse'"
            )
        low, high = parse_workers(str(self.workers))
        return JobSpec(
            name=self.name or name_from(script),
            script=script,
            args=self.args,
            min_workers=low,
            max_workers=high,
            standby=self.standby,
            env=self.env,
            checkpoint=CheckpointPolicy(**self.checkpoint.model_dump()),
            max_restarts=self.max_restarts,
            split=self.split,
            seed=self.seed,
            stall_timeout_s=self.stall_timeout_s,
            hang_s=self.hang_s,
            strategy=self.strategy,
            stale_sparse=self._stale_sparse(),
            adapt=self._adapt(),
        )

    def _adapt(self) -> Adaptation:
        from atoll.v1.common_pb2 import Adaptation

        low, high = self.adapt.batch or (0, 0)
        return Adaptation(
            min_batch=low,
            max_batch=high,
            learning_rate=self.adapt.learning_rate,
            rate=self.adapt.rate,
            profile=self.adapt.profile or "",
        )

    def _stale_sparse(self) -> StaleSparse | None:
        from atoll.v1.common_pb2 import StaleSparse

        if self.stale_sparse is None:
            return None
        settings = self.stale_sparse.model_dump(exclude={"error_feedback"})
        return StaleSparse(no_error_feedback=not self.stale_sparse.error_feedback, **settings)


def from_spec(spec: JobSpec) -> JobFile:
    """The job file that a submitted job could have had; without its offline profile, which is not sent back."""
    checkpoint, adapt = spec.checkpoint, spec.adapt
    sparse = spec.stale_sparse
    return JobFile(
        name=spec.name,
        script=spec.script,
        args=tuple(spec.args),
        workers=f"{spec.min_workers}:{spec.max_workers}",
        standby=spec.standby,
        env=dict(spec.env),
        checkpoint=CheckpointSection(
            directory=checkpoint.directory,
            every_steps=checkpoint.every_steps,
            keep=max(checkpoint.keep, 1),
            keep_every_steps=checkpoint.keep_every_steps,
            memory_replicas=checkpoint.memory_replicas if checkpoint.HasField("memory_replicas") else 2,
            site_safe=checkpoint.site_safe,
        ),
        max_restarts=spec.max_restarts,
        split=cast(Split, spec.split or "auto"),
        seed=spec.seed,
        stall_timeout_s=spec.stall_timeout_s,
        hang_s=spec.hang_s,
        strategy=cast(Strategy, spec.strategy or "dense"),
        stale_sparse=StaleSparseSection.model_validate(
            {
                **{field: getattr(sparse, field) for field in _SPARSE_FIELDS if _is_said(sparse, field)},
                "error_feedback": not sparse.no_error_feedback,
            }
        )
        if spec.HasField("stale_sparse")
        else None,
        adapt=AdaptSection.model_validate(
            {
                "batch": (adapt.min_batch, adapt.max_batch) if adapt.max_batch else None,
                "learning_rate": adapt.learning_rate or "adascale",
                "rate": adapt.rate,
            }
        ),
    )


_SPARSE_FIELDS: Final = tuple(name for name in StaleSparseSection.model_fields if name != "error_feedback")


def _is_said(sparse: StaleSparse, field: str) -> bool:
    """Whether a submitted job has a value of its own there."""
    if sparse.DESCRIPTOR.fields_by_name[field].has_presence:
        return sparse.HasField(cast(Any, field))
    return bool(getattr(sparse, field))


def parse_workers(text: str) -> tuple[int, int]:
    """'4' -> (4, 4), '2:8' -> (2, 8). Raises ValueError saying what is wrong."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text, re.ASCII)
    if match is None:
        raise ValueError("must be N or 'MIN:MAX', e.g. 4 or '2:8'")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if low < 1:
        raise ValueError("needs at least 1 worker")
    if low > high:
        raise ValueError(f"has a minimum of {low} above its maximum of {high}. Write it as {high}:{low}")
    if high > MAX_WORKERS:
        raise ValueError(f"may ask for at most {MAX_WORKERS} workers")
    return low, high


def name_from(script: str) -> str:
    """A job's name where its user chose none: the script's, with what a name may not hold replaced."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:40].rstrip("-")
    return stem or "job"


def load(path: Path) -> JobFile:
    """Read a job file. Raises NotFound or BadInput naming file, line, field and the nearest valid one."""
    document, text = read_toml("job file", path, _MAX_JOB_FILE_BYTES, large="A job file is a few lines of TOML")
    try:
        return JobFile.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = [part for part in first["loc"] if isinstance(part, str) and part not in _NOISE]
        line = line_of(text, keys) if keys else None  # none: of fields that do not fit each other
        where = f"{path} line {line}" if line else str(path)
        raise BadInput(f"job file {where}: {_explain(first)}") from error


def with_profile(job: JobFile, folder: Path) -> JobFile:
    """The job with its offline profile's surrogate, and what it is of, in place of the file's name. Raises NotFound,
    BadInput.

    folder: relative paths are relative to it."""
    if not job.adapt.profile:
        return job
    path = folder / job.adapt.profile
    document = load_profile(path)
    model = ProfiledModel.model_validate(document["model"])
    of = {"fingerprint": model.fingerprint, "words": model.in_words}
    surrogate = json.dumps(document["surrogate"] | {"model": of}, sort_keys=True)
    if len(surrogate) > _MAX_PROFILE_BYTES:
        raise BadInput(f"the surrogate of {path} is larger than {_MAX_PROFILE_BYTES} bytes. Use a coarser grid")
    return job.model_copy(update={"adapt": job.adapt.model_copy(update={"profile": surrogate})})


def with_flags(job: JobFile, flags: Mapping[str, Any]) -> JobFile:
    """The job with the command's flags on top. Raises BadInput naming the flag.

    flags: by field, `checkpoint.keep` for those of a section; None where the flag was not given.
    """
    merged: dict[str, Any] = job.model_dump()
    if flags.get("strategy") == "dense":  # the file's settings of the other strategy do not count then
        merged["stale_sparse"] = None
        merged["adapt"] = {**(merged["adapt"] or {}), "rate": False}
    for field, value in flags.items():
        if value is None:
            continue
        section, _, key = field.rpartition(".")
        if section:
            merged[section] = {**(merged[section] or {}), key: value}
        else:
            merged[field] = value
    try:
        return JobFile.model_validate(merged)
    except ValidationError as error:
        raise BadInput(_explain(error.errors(include_url=False)[0])) from error


def _explain(error: ErrorDetails) -> str:
    parts = [str(part) for part in error["loc"] if not (isinstance(part, str) and "[" in part) and part not in _NOISE]
    field = ".".join(parts)
    if error["type"] == "extra_forbidden":
        section = _SECTIONS[parts[0]] if len(parts) > 1 else JobFile
        return unknown_field(field, parts[-1], section.model_fields)
    if error["type"] == "value_error" and not field:
        return str(error["ctx"]["error"])
    if error["type"] == "value_error":
        return f"{field} = {error['input']!r} {error['ctx']['error']}"
    return wrong_value(field, error)


_SECTIONS: Final[Mapping[str, type[_Strict]]] = {
    "checkpoint": CheckpointSection,
    "stale_sparse": StaleSparseSection,
    "adapt": AdaptSection,
}
# pydantic names the branch of a union it tried; users know only the field.
_NOISE: Final = frozenset({"int", "str", "float"})
