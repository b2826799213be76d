"""Reads a job's description: the TOML job file and the command's flags, checked before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import (
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from atoll.errors import BadInput
from atoll.host.documents import explain, line_of, read_toml
from atoll.jobs import job_spec
from atoll.jobs.job_spec import CheckpointSection, Declaration, JobFields
from atoll.profiling.document import ProfiledModel, load_profile
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings

if TYPE_CHECKING:
    from atoll.v1.common_pb2 import JobSpec

_MAX_JOB_FILE_BYTES: Final = 1024 * 1024


class _AdaptSection(Declaration):
    """`[adapt]`: what the controller may decide beside the split of the batch. Plan parameters of strategies are fields
    as well: true lets the controller change one."""

    batch: tuple[job_spec.Count, job_spec.Count] | None = None
    """Least and largest total batch; the script's own stays where left out."""

    learning_rate: job_spec.Rule = "auto"
    """The learning rate's rule as the total batch changes; `auto`: `adascale` for SGD, `square-root` for others."""

    profile: job_spec.Profile | None = None
    """File that `atoll profile` wrote: what compression and batch cost this model. Its surrogate once it was read."""

    @field_validator("batch")
    @classmethod
    def _batch(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 1 <= value[0] <= value[1]:
            raise ValueError("must be the least and the largest total batch, e.g. [128, 1024]")
        return value

    @property
    def strategy_params(self) -> tuple[str, ...]:
        """Plan parameters of the strategy that the controller may change."""
        return tuple(name for name in _PLAN_PARAMETERS if getattr(self, name))


_PLAN_PARAMETERS: Final = tuple(
    dict.fromkeys(name for each in registry.strategies().values() for name in each.plan_parameters.adjustable())
)
if TYPE_CHECKING:

    class AdaptSection(_AdaptSection): ...

else:
    AdaptSection = create_model(
        "AdaptSection", __base__=_AdaptSection, **dict.fromkeys(_PLAN_PARAMETERS, (StrictBool, False))
    )


class _JobFile(JobFields):
    """A job as its user describes it. Relative paths are relative to the job file."""

    name: job_spec.Name | None = None
    script: job_spec.Text | None = None
    workers: StrictInt | StrictStr = 1
    secrets: Annotated[tuple[job_spec.Variable, ...], Field(max_length=job_spec.MAX_ENTRIES)] = ()
    """Names of the submitting user's variables. Workers get them; nobody is shown their values."""

    workdir: job_spec.Text | None = None
    requirements: job_spec.Requirements | StrictStr = ()
    """Packages that workers import beside those of their agent: lines as pip takes them, or the file that has them."""

    adapt: AdaptSection = AdaptSection()

    @field_validator("workers")
    @classmethod
    def _workers(cls, value: int | str) -> int | str:
        parse_workers(str(value))
        return value

    @field_validator("strategy")
    @classmethod
    def _strategy(cls, value: str) -> str:
        if value not in registry.names():
            raise ValueError(f"is not known. Use one of {', '.join(registry.names())}")
        return value

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        own = registry.find(self.strategy).section
        for section in _STRATEGY_SECTIONS:
            if section != own and getattr(self, section) is not None:
                raise ValueError(
                    f"strategy = '{self.strategy}' takes no {section} settings. "
                    f"Leave them out, or say strategy = '{_STRATEGY_SECTIONS[section].name}'"
                )
        return self

    def to_spec(self, script: str, environment: Mapping[str, str] = MappingProxyType({})) -> JobSpec:
        """Make the message to submit. script: its path inside the bundle. environment: has the values of `secrets`; a
        missing one is sent empty, which is refused except with another job's code, which has them. Raises BadInput."""
        strategy = registry.find(self.strategy)
        for name in self.adapt.strategy_params:
            if name not in strategy.plan_parameters.adjustable():  # not before: the strategy may be a flag
                having = [s.name for s in registry.strategies().values() if name in s.plan_parameters.adjustable()]
                raise BadInput(
                    f"adapt.{name} = true: strategy = '{self.strategy}' has no {name} to adapt. "
                    f"Leave it out, or say strategy = '{having[0]}'"
                )
        low, high = parse_workers(str(self.workers))
        least, largest = self.adapt.batch or (0, 0)
        said = self.settings_of(self.strategy)
        return job_spec.message_of(
            {
                **self.model_dump(include=set(JobFields.model_fields)),
                "name": self.name or name_from(self.module.rpartition(".")[2] if self.module else script),
                "script": script,
                "requirements": tuple(self.requirements),
                "min_workers": low,
                "max_workers": high,
                "secrets": {name: environment.get(name, "") for name in self.secrets},
                # The rest has the controller's defaults.
                "strategy_settings": said.model_dump(mode="json", exclude_unset=True) if said is not None else {},
                "adapt": {
                    "min_batch": least,
                    "max_batch": largest,
                    "learning_rate": self.adapt.learning_rate,
                    "strategy_params": self._followed(),
                    "profile": self.adapt.profile or "",
                },
            }
        )

    def _followed(self) -> tuple[str, ...]:
        """Return the plan parameters that the controller may change: those that `[adapt]` names, and the strategy's
        FOLLOWS, unless `[adapt]` or the strategy's table sets them."""
        table = self.settings_of(self.strategy)
        said = self.adapt.model_fields_set | (table.model_fields_set if table is not None else set())
        by_itself = registry.find(self.strategy).plan_parameters.FOLLOWS
        return (*self.adapt.strategy_params, *(name for name in by_itself if name not in said))

    def settings_of(self, strategy: str) -> StrategySettings | None:
        """Return the file's table of this strategy, None if it has none."""
        found: StrategySettings | None = getattr(self, registry.find(strategy).section, None)
        return found


_STRATEGY_SECTIONS: Final = {
    each.section: each for each in registry.strategies().values() if each.settings.model_fields
}
if TYPE_CHECKING:

    class JobFile(_JobFile): ...

else:
    JobFile = create_model(
        "JobFile",
        __base__=_JobFile,
        **{section: (each.settings | None, None) for section, each in _STRATEGY_SECTIONS.items()},
    )


def from_spec(spec: JobSpec) -> JobFile:
    """Return the job file that a submitted job could have had, without its offline profile, which is not sent back."""
    values, strategy = job_spec.values_of(spec), registry.find(spec.strategy)
    checkpoint, adapt = values.get("checkpoint", {}), values.get("adapt", {})
    job = {name: value for name, value in values.items() if name in JobFile.model_fields}
    job |= {
        "workers": f"{spec.min_workers}:{spec.max_workers}",
        "secrets": tuple(spec.secrets),
        "strategy": spec.strategy or registry.AUTO,
        "checkpoint": {name: checkpoint[name] for name in CheckpointSection.model_fields if name in checkpoint},
        "adapt": {
            "batch": (adapt["min_batch"], adapt["max_batch"]) if spec.adapt.max_batch else None,
            "learning_rate": spec.adapt.learning_rate or "auto",
            **dict.fromkeys(strategy.plan_parameters.FOLLOWS, False),
            **dict.fromkeys(spec.adapt.strategy_params, True),
        },
    }
    if spec.strategy_settings:
        job[strategy.section] = strategy.read_settings(spec.strategy_settings)
    return JobFile.model_validate(job)


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
    if high > job_spec.MAX_WORKERS:
        raise ValueError(f"may ask for at most {job_spec.MAX_WORKERS} workers")
    return low, high


def name_from(script: str) -> str:
    """Derive a job's name from its script: characters that a name may not hold are replaced."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:40].rstrip("-")
    return stem or "job"


def load(path: Path) -> JobFile:
    """Read a job file. Raises NotFound or BadInput naming file, line, field and the nearest valid one."""
    document, text = read_toml("job file", path, _MAX_JOB_FILE_BYTES, large="A job file is a few lines of TOML")
    try:
        return JobFile.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = [part for part in first["loc"] if isinstance(part, str)]
        line = line_of(text, keys) if keys else None  # none: of fields that do not fit each other
        where = f"{path} line {line}" if line else str(path)
        raise BadInput(f"job file {where}: {explain(JobFile, [first])}") from error


def with_profile(job: JobFile, folder: Path) -> JobFile:
    """Return the job with its offline profile's surrogate in place of the file's name. Raises NotFound, BadInput.

    folder: relative paths are relative to it."""
    if not job.adapt.profile:
        return job
    path = folder / job.adapt.profile
    document = load_profile(path)
    model = ProfiledModel.model_validate(document["model"])
    of = {"fingerprint": model.fingerprint, "words": model.in_words}
    surrogate = json.dumps(document["surrogate"] | {"model": of}, sort_keys=True)
    if len(surrogate) > job_spec.MAX_PROFILE_BYTES:
        raise BadInput(f"the surrogate of {path} is larger than {job_spec.MAX_PROFILE_BYTES} bytes. Use a coarser grid")
    return job.model_copy(update={"adapt": job.adapt.model_copy(update={"profile": surrogate})})


def with_flags(job: JobFile, flags: Mapping[str, Any]) -> JobFile:
    """Return the job with the command's flags on top. Raises BadInput naming the flag.

    flags: by field, `checkpoint.keep` for those of a section, `settings.sparsity` for those of the job's strategy; None
    for a flag that was not given.
    """
    merged: dict[str, Any] = job.model_dump(exclude_unset=True)
    chosen = str(flags.get("strategy") or job.strategy)
    _check_owners(flags, chosen, named=chosen if flags.get("strategy") else str(merged.get("strategy", "none")))
    if (
        flags.get("strategy") is not None and chosen in registry.names()
    ):  # what the file says of other strategies does not count then
        own = registry.find(chosen)
        for section in _STRATEGY_SECTIONS.keys() - {own.section}:
            merged.pop(section, None)
        others = set(_PLAN_PARAMETERS) - set(own.plan_parameters.adjustable())
        merged["adapt"] = {name: value for name, value in merged.get("adapt", {}).items() if name not in others}
    for one, other in (("script", "module"), ("module", "script")):
        if flags.get(one) is not None:
            merged.pop(other, None)
    for field, value in flags.items():
        if value is None:
            continue
        section, _, key = field.rpartition(".")
        if section == "settings":
            section = chosen.replace("-", "_")
        if section:
            merged[section] = {**(merged.get(section) or {}), key: value}
        else:
            merged[field] = value
    try:
        return JobFile.model_validate(merged)
    except ValidationError as error:
        raise BadInput(explain(JobFile, error.errors(include_url=False)[:1])) from error


def _check_owners(flags: Mapping[str, Any], chosen: str, named: str) -> None:
    """Check that all flags of strategies belong to the chosen one. Raises BadInput naming the strategies of the first
    that does not. named: the strategy that the user named, or "none"."""
    if chosen not in registry.names():
        return  # the job file's check names it
    for field in (field for field, value in flags.items() if value is not None):
        section, _, key = field.rpartition(".")
        if section == "settings":
            owners = [each.name for each in registry.strategies().values() if key in each.settings.model_fields]
        elif section == "adapt" and key in _PLAN_PARAMETERS:
            owners = [s.name for s in registry.strategies().values() if key in s.plan_parameters.adjustable()]
        else:
            continue
        if chosen not in owners:
            flag = f"--{'adapt-' if section == 'adapt' else ''}{key.replace('_', '-')}"
            raise BadInput(
                f"`{flag}` belongs to strategy {' or '.join(owners)}; you chose {named}. "
                f"Say --strategy {owners[0]}, or leave it out"
            )
