"""A JobSpec from the wire, checked field by field. Messages say field, value and next step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any, Final

from atoll.controller.jobs.records.offline_profile import offline_profile
from atoll.controller.state.records import Adapt, Checkpoint, Spec, StartFrom
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import as_json
from atoll.v1 import common_pb2 as pb

MAX_WORKERS: Final = 4096
MAX_ENTRIES: Final = 256
MAX_STRING_BYTES: Final = 4096
SPLITS: Final = ("auto", "inverse-time", "even")
LEARNING_RATES: Final = ("adascale", "square-root", "none")
MAX_BATCH: Final = 2**31 - 1
MAX_PROFILE_BYTES: Final = 256 * 1024
DEFAULT_REPLICAS: Final = 2
MAX_REPLICAS: Final = 8
_JOB_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_JOB_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?![^/@]*:[^/@]*@)[^\s?#]+")
_PASSWORD: Final = re.compile(r"://[^/@]*@")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def spec_from_wire(spec: pb.JobSpec) -> Spec:
    """The validated spec. Raises BadInput naming the first field that is wrong."""
    if not _JOB_NAME.fullmatch(spec.name):
        raise _wrong("name", spec.name, "must be 1 to 40 of a-z, 0-9 and '-', not beginning with '-'", "e.g. vit-base")
    _check_workers(spec)
    _check_args_and_env(spec)
    if not _SHA256.fullmatch(spec.code_sha256):
        raise _wrong("code_sha256", spec.code_sha256, "is not a SHA-256 in hex", "Send the digest of the tar.gz")
    if spec.split not in ("", *SPLITS):
        raise _wrong("split", spec.split, "is not known", f"Use one of {', '.join(SPLITS)}")
    if not (math.isfinite(spec.stall_timeout_s) and 0 <= spec.stall_timeout_s <= 86_400):
        raise _wrong("stall_timeout_s", spec.stall_timeout_s, "must be 0 to 86400 seconds", "Leave it out for 60 s")
    if not (math.isfinite(spec.hang_s) and 0 <= spec.hang_s <= 604_800):
        raise _wrong("hang_s", spec.hang_s, "must be 0 to 604800 seconds", "Leave it out, and nobody is stopped")
    return Spec(
        name=spec.name,
        script=_script(spec.script),
        args=tuple(spec.args),
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        env=dict(sorted(spec.env.items())),
        code_sha256=spec.code_sha256,
        checkpoint=_checkpoint(spec.checkpoint),
        max_restarts=spec.max_restarts,
        split=spec.split or SPLITS[0],
        seed=spec.seed,
        stall_timeout_s=spec.stall_timeout_s,
        hang_s=spec.hang_s,
        strategy=registry.find(spec.strategy, "spec.strategy").name,
        strategy_settings=_strategy_settings(spec),
        adapt=_adapt(spec),
        standby=spec.standby,
    )


def spec_to_wire(spec: Spec) -> pb.JobSpec:
    """The spec as agents and clients get it: without the offline profile, which only planning reads."""
    start = spec.checkpoint.start_from
    return pb.JobSpec(
        name=spec.name,
        script=spec.script,
        args=spec.args,
        min_workers=spec.min_workers,
        max_workers=spec.max_workers,
        env=spec.env,
        code_sha256=spec.code_sha256,
        checkpoint=pb.CheckpointPolicy(
            directory=spec.checkpoint.directory,
            every_steps=spec.checkpoint.every_steps,
            keep=spec.checkpoint.keep,
            memory_replicas=spec.checkpoint.memory_replicas,
            site_safe=spec.checkpoint.site_safe,
            keep_every_steps=spec.checkpoint.keep_every_steps,
            start_from=None if start is None else pb.StartFrom(**asdict(start)),
        ),
        max_restarts=spec.max_restarts,
        split=spec.split,
        seed=spec.seed,
        stall_timeout_s=spec.stall_timeout_s,
        hang_s=spec.hang_s,
        strategy=spec.strategy,
        strategy_settings=as_json(spec.strategy_settings),
        adapt=pb.Adaptation(**(asdict(spec.adapt) | {"profile": ""})),
        standby=spec.standby,
    )


def _wrong(field: str, value: object, why: str, next_step: str) -> BadInput:
    shown = repr(value)
    return BadInput(f"spec.{field} = {shown if len(shown) <= 200 else shown[:200] + '…'} {why}. {next_step}")


def _text(field: str, value: str) -> str:
    if len(value.encode()) > MAX_STRING_BYTES:
        raise _wrong(field, value, f"is longer than {MAX_STRING_BYTES} bytes", "Put it into a file of the bundle")
    if "\0" in value:
        raise _wrong(field, value, "has a zero byte", "Remove it")
    return value


def _script(script: str) -> str:
    """A relative path that stays inside the bundle."""
    _text("script", script)
    path = PurePosixPath(script)
    inside = bool(script) and not path.is_absolute() and ".." not in path.parts and str(path) != "."
    if not inside or "\\" in script or str(path).startswith("-"):
        raise _wrong("script", script, "must be a path inside the code bundle", "e.g. train.py or examples/train.py")
    return str(path)


def _check_workers(spec: pb.JobSpec) -> None:
    if not 1 <= spec.min_workers <= MAX_WORKERS:
        raise _wrong("min_workers", spec.min_workers, f"must be 1 to {MAX_WORKERS}", "Use e.g. --workers 1:4")
    if not spec.min_workers <= spec.max_workers <= MAX_WORKERS:
        why = f"must be at least min_workers = {spec.min_workers} and at most {MAX_WORKERS}"
        raise _wrong("max_workers", spec.max_workers, why, "Give workers as MIN:MAX")
    if spec.standby > MAX_WORKERS:
        raise _wrong("standby", spec.standby, f"must be at most {MAX_WORKERS}", "One machine at a time needs 1")


def _check_args_and_env(spec: pb.JobSpec) -> None:
    if len(spec.args) > MAX_ENTRIES:
        raise _wrong("args", f"{len(spec.args)} entries", f"are more than {MAX_ENTRIES}", "Put them into a file")
    for i, arg in enumerate(spec.args):
        _text(f"args[{i}]", arg)
    if len(spec.env) > MAX_ENTRIES:
        raise _wrong("env", f"{len(spec.env)} entries", f"are more than {MAX_ENTRIES}", "Put them into a file")
    for name, value in spec.env.items():
        if not _ENV_NAME.fullmatch(name) or len(name) > 255:
            raise _wrong("env", name, "is not a name of a variable", "Use letters, digits and '_'")
        _text(f"env[{name}]", value)


def _checkpoint(policy: pb.CheckpointPolicy) -> Checkpoint:
    directory = _directory("checkpoint.directory", policy.directory)
    replicas = policy.memory_replicas if policy.HasField("memory_replicas") else DEFAULT_REPLICAS
    if replicas > MAX_REPLICAS:
        why = f"must be at most {MAX_REPLICAS}: it multiplies the memory that checkpoints take"
        raise _wrong("checkpoint.memory_replicas", replicas, why, "Leave it out for 2; 0 keeps none in memory")
    keep = max(policy.keep, 1)
    return Checkpoint(
        directory=directory,
        every_steps=policy.every_steps,
        keep=keep,
        memory_replicas=replicas,
        site_safe=policy.site_safe,
        keep_every_steps=policy.keep_every_steps,
        start_from=_start_from(policy.start_from) if policy.HasField("start_from") else None,
    )


def _start_from(wire: pb.StartFrom) -> StartFrom:
    if wire.job and not _JOB_ID.fullmatch(wire.job):
        raise _wrong("checkpoint.start_from.job", wire.job, "is no id of a job", "`atoll jobs --all` lists them")
    directory = _directory("checkpoint.start_from.directory", wire.directory)
    if not wire.job and not directory:
        raise _wrong("checkpoint.start_from.directory", "", "is missing", "Name a job, a directory or a URL")
    return StartFrom(job=wire.job, directory=directory, step=wire.step if wire.HasField("step") else None)


def _directory(field: str, value: str) -> str:
    """Where checkpoints are: empty, an absolute path on the nodes, or the URL of an object store."""
    _text(field, value)
    if not value or _URL.fullmatch(value):
        return value
    if "://" in value:
        shown, why = _PASSWORD.sub("://...@", value), "is no URL that can be kept"
        raise _wrong(field, shown, why, "Use e.g. s3://bucket/folder; credentials belong to the nodes' environment")
    if not PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
        why = "must be an absolute path on the nodes, or a URL"
        raise _wrong(field, value, why, "Leave it out for the agent's own")
    return value


def _strategy_settings(spec: pb.JobSpec) -> dict[str, Any]:
    """Every setting of the job's strategy."""
    strategy = registry.find(spec.strategy, "spec.strategy")
    return strategy.read_settings(spec.strategy_settings, f"spec.{strategy.section}").said()


def _adapt(spec: pb.JobSpec) -> Adapt:
    wire = spec.adapt
    low, high = wire.min_batch, wire.max_batch
    if (low or high) and not spec.min_workers <= low <= high <= MAX_BATCH:
        why = f"to {high} is no range of the total batch with at least {spec.min_workers} workers"
        raise _wrong("adapt.min_batch", low, why, "Give both, e.g. batch = [128, 1024], or neither")
    if high and spec.split not in ("", "auto"):
        raise _wrong("adapt.max_batch", high, f'has no meaning with split "{spec.split}"', 'Use split "auto"')
    strategy = registry.find(spec.strategy)
    for name in wire.strategy_params:
        if name not in strategy.plan_parameters.model_fields:
            raise _wrong(f"adapt.{name}", True, f'is nothing that strategy "{strategy.name}" adapts', "Leave it out")
    if wire.learning_rate not in ("", *LEARNING_RATES):
        raise _wrong("adapt.learning_rate", wire.learning_rate, "is not known", f"Use {', '.join(LEARNING_RATES)}")
    if len(wire.profile) > MAX_PROFILE_BYTES:
        raise _wrong("adapt.profile", f"{len(wire.profile)} characters", "is too long", "Profile on a coarser grid")
    if wire.profile:
        if "sparsity" not in strategy.plan_parameters.model_fields:
            compress = [s.name for s in registry.strategies().values() if "sparsity" in s.plan_parameters.model_fields]
            raise _wrong("adapt.profile", "…", "is of compression", f"Leave it out, or use {' or '.join(compress)}")
        try:
            offline_profile(wire.profile)
        except BadInput as error:
            raise BadInput(f"spec.adapt.profile: {error}") from error
    return Adapt(
        min_batch=low,
        max_batch=high,
        learning_rate=wire.learning_rate or LEARNING_RATES[0],
        strategy_params=tuple(wire.strategy_params),
        profile=wire.profile,
    )


def check_total_batch(total_batch: int, workers: int) -> int:
    """A total batch that a user asks for. Raises BadInput."""
    if not workers <= total_batch <= MAX_BATCH:
        raise BadInput(f"total_batch = {total_batch} must be {workers} (a sample for each worker) to {MAX_BATCH}")
    return total_batch


def check_shares(shares: Sequence[float], workers: int) -> tuple[float, ...]:
    """Shares that a user asks for. Raises BadInput."""
    if len(shares) != workers:
        raise BadInput(f"{len(shares)} shares do not fit a run of {workers} workers. Give one for each rank")
    for rank, share in enumerate(shares):
        if not (share > 0 and math.isfinite(share)):
            raise BadInput(f"the share {share!r} of rank {rank} must be above 0. A rank with little to do gets little")
    return tuple(shares)
