"""The spec of a job, declared once: fields, limits and defaults.

The job file, etcd's JSON and the message derive from it. The client checks a spec to report errors early, the
controller when it enters; agents and workers read the message unchecked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from google.protobuf.message import Message
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    Strict,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from atoll.errors import BadInput, SettingError
from atoll.host.documents import adapter
from atoll.network.message_limits import JOB_ID, SHA256
from atoll.strategies import registry
from atoll.strategies.declaration import as_json, said
from atoll.v1 import common_pb2 as pb

MAX_WORKERS: Final = 4096
MAX_ENTRIES: Final = 256
MAX_REPLICAS: Final = 8
MAX_STRING_BYTES: Final = 4096
ENVIRONMENT_S: Final = 900.0
"""Time that a node may take to make a job's own environment, in seconds."""
MAX_BATCH: Final = 2**31 - 1
MAX_PROFILE_BYTES: Final = 256 * 1024
_JOB_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?![^/@]*:[^/@]*@)[^\s?#]+")
_PASSWORD: Final = re.compile(r"://[^/@]*@")
_VARIABLES: Final = ("spec.env", "spec.secrets")  # whose keys are names of the user's
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


SECRET_WITHHELD: Final = (
    "is empty. A controller that serves other machines without TLS hands out none",
    "Set it where you submit, and use certificates",
)
"""Cause and next step where the value of a secret did not come along."""
_LEFT_OUT: Final = frozenset({"split", "learning_rate", "keep"})
"""Fields whose zero value in a message means that it leaves them out."""


def _rule(holds: Callable[[Any], object], otherwise: str) -> AfterValidator:
    """Check that `holds` is true of a value. otherwise: the cause and next step of the error."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(otherwise)
        return value

    return AfterValidator(check)


def _is_in_bundle(script: str) -> bool:
    path = PurePosixPath(script)
    inside = bool(script) and not path.is_absolute() and ".." not in path.parts and str(path) != "."
    return inside and "\\" not in script and not str(path).startswith("-")


def _is_directory(value: str) -> bool:
    path = PurePosixPath(value)
    return not value or "://" in value or (path.is_absolute() and ".." not in path.parts)


def _revealed(text: str | SecretStr) -> str:
    return text.get_secret_value() if isinstance(text, SecretStr) else text


_WITHOUT_ZERO: Final = _rule(lambda text: "\0" not in _revealed(text), "has a zero byte. Remove it")
_OF_A_STRING: Final = _rule(
    lambda text: len(_revealed(text).encode(errors="surrogatepass")) <= MAX_STRING_BYTES,
    f"is longer than {MAX_STRING_BYTES} bytes. Put it into a file of the bundle",
)
Text = Annotated[str, _WITHOUT_ZERO, _OF_A_STRING]
# Of another type than text: whoever shows or logs one without asking for its value shows asterisks.
Secret = Annotated[SecretStr, _WITHOUT_ZERO, _OF_A_STRING, PlainSerializer(_revealed, when_used="json")]
Count = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
Name = Annotated[
    str,
    _rule(_JOB_NAME.fullmatch, "must be 1 to 40 of a-z, 0-9 and '-', not beginning with '-'. Write it like vit-base"),
]
Script = Annotated[
    Text,
    _rule(_is_in_bundle, "must be a path inside the code bundle. Write it like train.py or examples/train.py"),
    AfterValidator(lambda script: str(PurePosixPath(script))),
]
Module = Annotated[
    str,
    _rule(
        lambda name: not name or all(part.isidentifier() for part in name.split(".")),
        "is no name of a module. Write it like package.train",
    ),
    _OF_A_STRING,
]
Requirement = Annotated[Text, _rule(str.isprintable, "must be one line. Write it like einops>=0.8")]
Requirements = Annotated[tuple[Requirement, ...], Field(max_length=MAX_ENTRIES)]
Arguments = Annotated[tuple[Text, ...], Field(max_length=MAX_ENTRIES)]
Variable = Annotated[str, _rule(_VARIABLE.fullmatch, "is not a name of a variable. Use letters, digits and '_'")]
Environment = Annotated[Mapping[Variable, Text], Field(max_length=MAX_ENTRIES)]
Secrets = Annotated[Mapping[Variable, Secret], Field(max_length=MAX_ENTRIES)]
Directory = Annotated[
    Text,
    _rule(
        lambda text: "://" not in text or _URL.fullmatch(text),
        "is no URL that can be kept. Use e.g. s3://bucket/folder; credentials belong to the nodes' environment",
    ),
    _rule(
        _is_directory,
        "must be an absolute path, for the nodes have other working folders, or a URL like s3://bucket/folder. "
        "Leave it out for the agent's own",
    ),
]
JobId = Annotated[str, _rule(lambda job: not job or JOB_ID.fullmatch(job), "is no id of a job. See `atoll jobs --all`")]
Sha256 = Annotated[str, _rule(SHA256.fullmatch, "is not a SHA-256 in hex. Send the digest of the tar.gz")]
Workers = Annotated[int, Strict(), Field(ge=1, le=MAX_WORKERS)]
Standby = Annotated[int, Strict(), Field(ge=0, le=MAX_WORKERS)]
Keep = Annotated[int, Strict(), Field(ge=1, lt=2**32)]
Replicas = Annotated[int, Strict(), Field(ge=0, le=MAX_REPLICAS)]
Split = Literal["auto", "inverse-time", "even"]
Rule = Literal["auto", "adascale", "square-root", "none"]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**64)]
StallTimeout = Annotated[float, Strict(), Field(ge=0, le=86_400)]
HangTime = Annotated[float, Strict(), Field(ge=0, le=604_800)]
StopGrace = Annotated[float, Strict(), Field(ge=0, le=86_400)]
Profile = Annotated[str, Field(max_length=MAX_PROFILE_BYTES)]


class Declaration(BaseModel):
    """Base of the parts of a job's declaration."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StartFrom(Declaration):
    """The checkpoint of another job that this one begins with. step: None for the newest."""

    job: JobId = ""
    directory: Directory = ""
    step: StrictInt | None = None


class CheckpointSection(Declaration):
    """`[checkpoint]`: where and how often the model is saved."""

    directory: Directory = ""
    """Absolute path on the nodes, or the URL of an object store, e.g. s3://bucket/vit, which is kept level with the
    agent's own folder for the job; empty = that folder alone."""

    every_steps: Count = 200
    """Steps between checkpoints; 0 = only at the end."""

    keep: Keep = 2
    """Complete checkpoints kept."""

    keep_every_steps: Count = 0
    """The first checkpoint at or after each multiple of this stays for good; 0 = none."""

    memory_replicas: Replicas = 2
    """Machines that hold each part of the state in their memory as well; 1 = its own alone, 0 = none."""

    site_safe: StrictBool = False
    """Those machines in different islands: slower, but the loss of an island loses nothing."""


class JobFields(Declaration):
    """The fields that a job file and a submitted spec share, with their defaults."""

    module: Module = ""
    """Module for `python -m` in place of a script, found from `workdir` or the working folder."""

    args: Arguments = ()
    standby: Standby = 0
    """Free devices beyond `workers` that no other job gets, to take the places of lost ones at once."""

    env: Environment = {}
    setup: Text = ""
    """Commands for sh, run once in the job's own environment when its requirements are there."""

    checkpoint: CheckpointSection = CheckpointSection()
    max_restarts: Count = 1
    split: Split = "auto"
    seed: Seed = 0
    stall_timeout_s: StallTimeout = 0.0
    hang_s: HangTime = 0.0
    """A worker that completes no step for this long is stopped and its run tried again; 0: the user is only notified.
    Longer than the longest evaluation, and than what comes before the first step."""

    stop_grace_s: StopGrace = 0.0
    """Time for workers to reach a step boundary when their run is to grow, to shrink or is cancelled: longer than the
    longest step; 0: 10 s, on cancel 2 s. A worker that saves gets the time it needs, whatever this says."""

    strategy: StrictStr = registry.AUTO


class Checkpoint(CheckpointSection):
    """The checkpoint policy of a submitted job, as atoll.v1.CheckpointPolicy."""

    start_from: StartFrom | None = None


class Adapt(Declaration):
    """Decisions that a job leaves to the controller, as atoll.v1.Adaptation.

    min_batch, max_batch: range of the total batch, both 0 if it is fixed. strategy_params: the strategy's plan
    parameters that may change. profile: the surrogate of the offline profile as JSON, empty if there is none."""

    min_batch: Count = 0
    max_batch: Count = 0
    learning_rate: Rule = "auto"
    strategy_params: tuple[StrictStr, ...] = ()
    profile: Profile = ""


class JobSpec(JobFields):
    """A submitted job: checked where it enters the controller, kept in etcd, sent as atoll.v1.JobSpec."""

    name: Name
    script: Script
    min_workers: Workers = 1
    max_workers: Workers = 1
    code_sha256: Sha256
    requirements: Requirements = ()
    secrets: Secrets = {}
    checkpoint: Checkpoint = Checkpoint()
    strategy_settings: Mapping[str, Any] = {}
    """Every setting of the strategy."""

    adapt: Adapt = Adapt()

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        registry.find(self.strategy, "spec.strategy").check_settings(self.strategy_settings, "spec.strategy_settings")
        return self

    @property
    def environment_s(self) -> float:
        """Time that making the job's own environment may take, in seconds; 0 if it has none."""
        return ENVIRONMENT_S if self.requirements or self.setup else 0.0

    @property
    def stages(self) -> int:
        """Workers that hold the model together: a run has a multiple of them."""
        return registry.find(self.strategy).settings.model_validate(dict(self.strategy_settings)).stages_of_model


def from_wire(wire: pb.JobSpec) -> JobSpec:
    """Check a spec in full and fill in every setting of its strategy. Raises BadInput naming the first wrong field."""
    strategy, name = registry.find(wire.strategy, "spec.strategy"), wire.strategy or registry.AUTO
    settings = strategy.read_settings(wire.strategy_settings, f"spec.{strategy.section}")
    values = {**values_of(wire), "strategy": name, "strategy_settings": settings.said()}
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False)[0]) from error
    for name, value, why, next_step in _misfits(spec):
        raise SettingError(f"spec.{name}", value, why, next_step)
    return spec


def to_wire(spec: JobSpec, *, reveal: bool = False) -> pb.JobSpec:
    """Make the message for agents and clients: without the offline profile, which only planning reads.

    reveal: with the values of the job's secrets, for an agent."""
    values = spec.model_dump()
    values["secrets"] = {name: _revealed(value) if reveal else "" for name, value in spec.secrets.items()}
    values["adapt"]["profile"] = ""
    return message_of(values)


def message_of(values: Mapping[str, Any]) -> pb.JobSpec:
    """Make the message of a spec's values, by field; nothing is checked."""
    return pb.JobSpec(**{**values, "strategy_settings": as_json(values["strategy_settings"])})


def values_of(wire: Message) -> dict[str, Any]:
    """Return the fields that a message sets."""
    said: dict[str, Any] = {}
    for each in wire.DESCRIPTOR.fields:
        value = getattr(wire, each.name)
        if each.has_presence and not wire.HasField(each.name):
            continue
        if isinstance(value, Message):
            said[each.name] = values_of(value)
        elif isinstance(value, Mapping):
            said[each.name] = dict(sorted(value.items()))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            said[each.name] = tuple(value)
        elif value or each.name not in _LEFT_OUT:
            said[each.name] = value
    return said


def _misfits(spec: JobSpec) -> Iterator[tuple[str, object, str, str]]:
    """Yield fields that do not fit each other: name, value, cause, next step."""
    adapt, start = spec.adapt, spec.checkpoint.start_from
    if spec.max_workers < spec.min_workers:
        why = f"must be at least min_workers = {spec.min_workers} and at most {MAX_WORKERS}"
        yield "max_workers", spec.max_workers, why, "Give workers as MIN:MAX"
    for name, workers in (("min_workers", spec.min_workers), ("max_workers", spec.max_workers)):
        if workers % spec.stages:
            yield name, workers, f"makes up no whole pipelines of {spec.stages} stages", "Give multiples of the stages"
    low, high = adapt.min_batch, adapt.max_batch
    if (low or high) and not spec.min_workers <= low <= high <= MAX_BATCH:
        why = f"to {high} is no range of the total batch with at least {spec.min_workers} workers"
        yield "adapt.min_batch", low, why, "Give both, e.g. batch = [128, 1024], or neither"
    if high and spec.split != "auto":
        yield "adapt.max_batch", high, f'has no meaning with split "{spec.split}"', 'Use split "auto"'
    parameters = registry.find(spec.strategy).plan_parameters.adjustable()
    for name in adapt.strategy_params:
        if name not in parameters:
            yield f"adapt.{name}", True, f'is nothing that strategy "{spec.strategy}" adapts', "Leave it out"
    if adapt.profile and "sparsity" not in parameters:
        compress = [s.name for s in registry.strategies().values() if "sparsity" in s.plan_parameters.adjustable()]
        yield "adapt.profile", "…", "is of compression", f"Leave it out, or use {' or '.join(compress)}"
    for name, value in spec.secrets.items():
        if name in spec.env:
            yield f"secrets.{name}", "***", "is in env too, where everyone sees it", "Leave it out there"
        if not value:
            yield f"secrets.{name}", "", *SECRET_WITHHELD
    if start is not None and not start.job and not start.directory:
        yield "checkpoint.start_from.directory", "", "is missing", "Name a job, a directory or a URL"


def _wrong(error: ErrorDetails, path: str = "spec") -> BadInput:
    """Word what pydantic found as a sentence about the field, with the value but without secrets."""
    for part in (part for part in error["loc"] if part != "[key]"):
        path += f".{part}" if isinstance(part, str) and not path.startswith(_VARIABLES) else f"[{part}]"
    if error["loc"][-1:] == ("[key]",):
        path = path.rpartition("[")[0]
    if error["type"] == "missing":
        return BadInput(f"{path} is missing. Give it")
    value = repr(error["input"])
    if error["type"] == "too_long":
        value = f"'{len(error['input'])} entries'"
    elif error["type"] == "string_too_long":
        value = f"'{len(error['input'])} characters'"
    elif path.startswith("spec.secrets["):
        value = "'***'"
    shown = _PASSWORD.sub("://...@", value if len(value) <= 200 else value[:200] + "…")
    return BadInput(f"{path} = {shown} {said(error)}")


def check_total_batch(total_batch: int, workers: int) -> int:
    """Check the total batch that a user asks for. Raises BadInput."""
    if not workers <= total_batch <= MAX_BATCH:
        raise BadInput(f"total_batch = {total_batch} must be {workers} (a sample for each worker) to {MAX_BATCH}")
    return total_batch


def check_shares(shares: Sequence[float], workers: int, name: str = "shares") -> tuple[float, ...]:
    """Check the shares of a step's batch, one for each rank. Raises BadInput."""
    if not len(shares) == workers <= MAX_WORKERS or not shares:
        why = f"do not fit a run of {workers} workers, at most {MAX_WORKERS}. Give one for each rank"
        raise BadInput(f"{name}: {len(shares)} values {why}")
    for rank, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise BadInput(f"{name}: {share!r} of rank {rank} must be above 0. A rank with little to do gets little")
    return tuple(float(share) for share in shares)


def check_directory(name: str, value: str) -> None:
    """Check a checkpoint directory: empty, an absolute path, or the URL of an object store. Raises BadInput."""
    try:
        adapter(Directory).validate_python(value)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False)[0], name) from error
