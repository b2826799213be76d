"""Checks messages of agents for size and sense. Heartbeats pass here a thousand times a second, so checks are few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from functools import lru_cache
from operator import attrgetter
from typing import Final

from atoll.errors import BadInput
from atoll.network.message_limits import (
    HOST,
    JOB_ID,
    MAX_JOB_ID,
    MAX_RANK,
    MAX_SHARERS,
    MAX_TEXT,
    NODE_NAME,
    PROTOCOL,
    SHA256,
)
from atoll.strategies.declaration import MAX_JSON_BYTES
from atoll.telemetry.telemetry_limits import (
    FAMILIES,
    MAX_DROP_REASONS,
    MAX_LINKS,
    MAX_METRICS,
    MAX_NOTICES,
    MAX_REPORTS,
    MAX_STEPS,
    TIERS,
    amounts_of,
    are_amounts,
    flaw_of_facts,
    flaw_of_link,
    flaw_of_metrics,
    flaw_of_step,
)
from atoll.v1 import agents_pb2, common_pb2

MAX_DEVICES: Final = 64
MAX_PORTS: Final = 64
MAX_MEMORY_JOBS: Final = 256
MAX_SHARDS: Final = 4096
MAX_CHECKPOINTS: Final = 256
MAX_TROUBLES: Final = 16
MAX_WORKERS: Final = 1024
MAX_COUNT: Final = 2**40
SHARDS_KEY_BYTES: Final = 32
LINKS_SECRET_BYTES: Final = 32
MAX_LINK_BPS: Final = 1e15
MAX_LINK_S: Final = 1e3
_PREPARED: Final = ("entries", "samples", "batch_size", "shared_bytes", "own_bytes")
MAX_POINTS: Final = 16
MAX_LOG_BYTES: Final = 256 * 1024
MAX_WORK_PER_S: Final = 1e18
MAX_CELSIUS: Final = 1000.0
_KINDS: Final = ("cuda", "cpu")
_of_estimate: Final = attrgetter("step_s", "stall_share", "gamma", "gamma_variance")
_of_profile: Final = attrgetter("compute_s", "compute_error_s")
_of_line: Final = attrgetter("q", "s", "k", "m", "error")


def check_register(register: agents_pb2.Register) -> None:
    """Raises BadInput naming the field."""
    port, key = register.shards_port, register.shards_key
    if port and not (1024 <= port <= 65535 and len(key) == SHARDS_KEY_BYTES):
        told = f"register.shards_port = {port} with a key of {len(key)} bytes"
        raise BadInput(f"{told} must be 1024 to 65535 with {SHARDS_KEY_BYTES} bytes")
    port, key = register.links_port, register.links_secret
    if port and not (1024 <= port <= 65535 and len(key) == LINKS_SECRET_BYTES):
        told = f"register.links_port = {port} with a secret of {len(key)} bytes"
        raise BadInput(f"{told} must be 1024 to 65535 with {LINKS_SECRET_BYTES} bytes")
    if register.protocol != PROTOCOL:
        raise BadInput(
            f"register.protocol = {register.protocol}: this controller speaks {PROTOCOL}. "
            "Run the same version of Atoll on all machines"
        )
    for field in ("name", *(each for each in ("island", "rack") if getattr(register, each))):
        value = getattr(register, field)
        if not NODE_NAME.fullmatch(value):
            raise BadInput(
                f"register.{field} = {value[:80]!r} must be 1 to 63 of letters, digits, '.', '_' and '-', beginning "
                f"with a letter or digit. Give the agent another --{field}"
            )
    for field in ("session", "address", "version", "token", "host"):
        _text(f"register.{field}", getattr(register, field))
    if not register.session:
        raise BadInput("register.session must not be empty")
    if not HOST.fullmatch(register.address):
        raise BadInput(f"register.address = {register.address[:80]!r} is no host. Give the agent an --address")
    if not register.devices:
        raise BadInput(f"register.devices has 0 entries, must have 1 to {MAX_DEVICES}")
    _at_most("register.devices", register.devices, MAX_DEVICES)
    if len({device.index for device in register.devices}) != len(register.devices):
        raise BadInput("register.devices has one index twice")
    for device in register.devices:
        _check_device(device)
    if not math.isfinite(register.unix_s):
        raise BadInput(f"register.unix_s = {register.unix_s} is no time")
    check_statuses(register.workers, register.rendezvous_ports, register.memory_jobs)


def check_link_measured(link: agents_pb2.LinkMeasured) -> None:
    if not NODE_NAME.fullmatch(link.node):
        raise BadInput(f"link.node = {link.node[:80]!r} is no name of a node")
    _text("link.trouble", link.trouble)
    bounds = {"rtt_s": MAX_LINK_S, "busy_s": MAX_LINK_S, "to_bps": MAX_LINK_BPS, "from_bps": MAX_LINK_BPS}
    for field, most in bounds.items():
        value = getattr(link, field)
        if not 0 <= value <= most or (not value and not link.trouble):  # NaN too
            raise BadInput(f"link.{field} = {value} must be above 0 and at most {most:g}")


def _check_device(device: common_pb2.Device) -> None:
    where = f"register.devices[{device.index}]"
    if device.kind not in _KINDS:
        raise BadInput(f"{where}.kind = {device.kind[:80]!r} must be one of {', '.join(_KINDS)}")
    _text(f"{where}.model", device.model)
    _text(f"{where}.uuid", device.uuid)
    if not 0 < device.speed <= 1:
        raise BadInput(f"{where}.speed = {device.speed} must be above 0 and at most 1")
    if not 0 <= device.work_per_s <= MAX_WORK_PER_S:  # NaN too
        raise BadInput(f"{where}.work_per_s = {device.work_per_s} must be between 0 and {MAX_WORK_PER_S:g}")
    if device.sharers > MAX_SHARERS:
        raise BadInput(f"{where}.sharers = {device.sharers} must be at most {MAX_SHARERS}")


def check_statuses(
    workers: Sequence[common_pb2.WorkerStatus], ports: Sequence[int], memory_jobs: Sequence[str] = ()
) -> None:
    """Raises BadInput naming the field."""
    _at_most("workers", workers, MAX_WORKERS)
    if len(ports) > MAX_PORTS or any(not 1 <= port <= 65535 for port in ports):
        raise BadInput(f"rendezvous_ports must be at most {MAX_PORTS} ports between 1 and 65535")
    if len(memory_jobs) > MAX_MEMORY_JOBS or not all(JOB_ID.fullmatch(job) for job in memory_jobs):
        raise BadInput(f"memory_jobs must be at most {MAX_MEMORY_JOBS} ids of jobs, not {list(memory_jobs)[:4]!r:.200}")
    for status in workers:
        _check_id("workers", status.id)
        _text("workers.reason", status.reason)
        if status.volunteer_port > 65535:
            raise BadInput(f"workers.volunteer_port = {status.volunteer_port} must be at most 65535")


def check_inventory(inventory: agents_pb2.Inventory) -> None:
    """Raises BadInput naming the field."""
    limits = (("memory", MAX_SHARDS), ("disk", MAX_CHECKPOINTS), ("store", MAX_CHECKPOINTS), ("troubles", MAX_TROUBLES))
    for field, most in limits:
        _at_most(f"inventory.{field}", getattr(inventory, field), most)
    for shard in inventory.memory:
        _text("inventory.memory.trouble", shard.trouble)
        if not math.isfinite(shard.age_s) or not 0 < shard.shards <= MAX_SHARDS or shard.shard >= shard.shards:
            raise BadInput(
                f"inventory.memory: shard {shard.shard} of {shard.shards}, {shard.age_s} s old, makes no sense"
            )
    for held in (*inventory.disk, *inventory.store):
        _text("inventory.trouble", held.trouble)
        _text("inventory.path", held.path)
        if not math.isfinite(held.age_s):
            raise BadInput(f"inventory: {held.path[:80]!r} is {held.age_s} s old, which makes no sense")
    for trouble in inventory.troubles:
        _text("inventory.troubles", trouble)


def check_telemetry(telemetry: agents_pb2.Telemetry) -> None:
    """Raises BadInput naming the field."""
    _at_most("telemetry.workers", telemetry.workers, MAX_WORKERS)
    amounts: list[float] = []  # of all workers, looked at together: which is wrong is asked where one is
    for worker in telemetry.workers:
        _check_id("telemetry.workers", worker.id)
        _check_lists(worker, amounts)
        if worker.HasField("prepared"):
            _check_prepared(worker.prepared)
        if worker.HasField("resumed") and (worker.resumed.tier not in TIERS or worker.resumed.step > MAX_COUNT):
            shown = f"{worker.resumed.tier[:80]!r}, step {worker.resumed.step}"
            raise BadInput(f"telemetry.workers.resumed = {shown} must be one of {', '.join(TIERS)} and a step")
        if worker.HasField("estimate"):
            _check_estimate(worker.estimate, amounts)
    if not are_amounts(amounts):
        _name_amount(telemetry.workers)
    _at_most("telemetry.sums", telemetry.sums, MAX_DEVICES)
    for sums in telemetry.sums:
        _check_sums(sums)
    _check_samples(telemetry.devices)


def _check_lists(worker: agents_pb2.WorkerTelemetry, amounts: list[float]) -> None:
    _at_most("telemetry.workers.steps", worker.steps, MAX_STEPS)
    _at_most("telemetry.workers.metrics", worker.metrics, MAX_REPORTS)
    _at_most("telemetry.workers.notices", worker.notices, MAX_NOTICES)
    _at_most("telemetry.workers.links", worker.links, MAX_LINKS)
    for sample in worker.steps:
        amounts += amounts_of(sample)
        if sample.strategy_metrics and (flaw := flaw_of_metrics(sample)) is not None:
            raise BadInput(f"telemetry.workers.steps.{flaw}")
    for notice in worker.notices:
        _text("telemetry.workers.notices.text", notice.text)
    for one in worker.metrics:
        _at_most("telemetry.workers.metrics.values", one.values, MAX_METRICS)
    for link in worker.links:
        _check_link(link)


def _check_prepared(prepared: agents_pb2.Prepared) -> None:
    for field in _PREPARED:
        if (value := getattr(prepared, field)) > MAX_COUNT:
            raise BadInput(f"telemetry.workers.prepared.{field} = {value} must be at most {MAX_COUNT}")
    if prepared.fingerprint and not SHA256.fullmatch(prepared.fingerprint):
        raise BadInput("telemetry.workers.prepared.fingerprint must be 64 hexadecimal digits, or empty")
    if prepared.optimizer not in FAMILIES:
        known = ", ".join(filter(None, FAMILIES))
        raise BadInput(f"telemetry.workers.prepared.optimizer = {prepared.optimizer[:80]!r} is none of {known}")
    if (flaw := flaw_of_facts(prepared)) is not None:
        raise BadInput(f"telemetry.workers.prepared.{flaw}")


def _check_estimate(estimate: agents_pb2.RankEstimate, amounts: list[float]) -> None:
    amounts += _of_estimate(estimate)
    if not estimate.HasField("profile"):
        return
    profile = estimate.profile
    batches, compute_s, errors = profile.point_batches, profile.point_compute_s, profile.point_errors
    amounts += _of_profile(profile)
    amounts += compute_s
    amounts += errors
    if profile.HasField("line"):
        amounts += _of_line(profile.line)
    if not len(batches) == len(compute_s) == len(errors) <= MAX_POINTS:
        points = (len(batches), len(compute_s), len(errors))
        raise BadInput(f"telemetry.workers.estimate.profile: points of {points} entries, at most {MAX_POINTS}, alike")
    if not profile.compute_s > 0:
        raise BadInput(f"telemetry.workers.estimate.profile.compute_s = {profile.compute_s} must be above 0")


def _name_amount(workers: Iterable[agents_pb2.WorkerTelemetry]) -> None:
    """Raises BadInput for the first that is none; only together they may be too large."""
    for worker in workers:
        for sample in worker.steps:
            if (flaw := flaw_of_step(sample)) is not None:
                raise BadInput(f"telemetry.workers.steps.{flaw}")
        amounts: list[float] = []
        _check_estimate(worker.estimate, amounts)
        if not are_amounts(amounts):
            told = f"telemetry.workers.estimate of step {worker.estimate.last_step}"
            raise BadInput(f"{told}: each number must be at least 0")


def _check_sums(sums: agents_pb2.StepSums) -> None:
    if not JOB_ID.fullmatch(sums.job) or not 1 <= sums.run < 10**6:
        raise BadInput(f"telemetry.sums of {sums.job[:80]!r}, run {sums.run}: no such run can be")
    told = {len(sums.steps), len(sums.ranks), len(sums.sync_s), len(sums.last_sync_s)}
    counts = (sums.total_batches, sums.sampled_ranks, sums.samples, sums.halves)
    columns = (*counts, sums.weighted_sqnorms, sums.combined_sqnorms)
    sampled = {len(sums.sampled_steps), *(len(column) for column in columns)}
    if len(told) > 1 or len(sampled) > 1 or max(*told, *sampled) > MAX_STEPS:
        raise BadInput(
            f"telemetry.sums has columns of {sorted(told)} and {sorted(sampled)} entries: each group must be of one "
            f"length, at most {MAX_STEPS}"
        )
    if not are_amounts((*sums.sync_s, *sums.last_sync_s, *sums.weighted_sqnorms, *sums.combined_sqnorms)):
        raise BadInput(f"telemetry.sums of {sums.job}, run {sums.run}: each number must be at least 0")


def _check_samples(samples: Sequence[common_pb2.DeviceSample]) -> None:
    _at_most("telemetry.devices", samples, MAX_DEVICES)
    if len({sample.index for sample in samples}) != len(samples):
        raise BadInput("telemetry.devices has one index twice")
    for sample in samples:  # absent fields read as 0
        if not 0 <= sample.utilisation <= 1:
            raise BadInput(f"telemetry.devices.utilisation = {sample.utilisation} must be 0 to 1")
        if not -MAX_CELSIUS <= sample.temperature_c <= MAX_CELSIUS:
            raise BadInput(f"telemetry.devices.temperature_c = {sample.temperature_c} is no temperature")


def _check_link(link: common_pb2.LinkSample) -> None:
    if (flaw := flaw_of_link(link)) is not None:
        raise BadInput(f"telemetry.workers.links.{flaw}")
    _at_most("telemetry.workers.links.dropped", link.dropped, MAX_DROP_REASONS)
    for reason in link.dropped:
        _text("telemetry.workers.links.dropped", reason)


def check_log(batch: agents_pb2.LogBatch) -> None:
    """Raises BadInput naming the field."""
    _check_id("log", batch.id)
    _at_most("log.data", batch.data, MAX_LOG_BYTES, "bytes")


def check_strategy_message(message: common_pb2.StrategyMessage) -> None:
    """Raises BadInput naming the field."""
    _check_id("strategy", message.id)
    _at_most("strategy.body", message.body, MAX_JSON_BYTES, "characters")


@lru_cache(maxsize=4096)
def _is_job_id(text: str) -> bool:
    return JOB_ID.fullmatch(text) is not None


def _check_id(where: str, worker: common_pb2.WorkerId) -> None:
    job = worker.job
    if len(job) > MAX_JOB_ID or not _is_job_id(job) or not 1 <= worker.run < 10**6 or worker.rank >= MAX_RANK:
        shown = f"{worker.job[:80]!r}, run {worker.run}, rank {worker.rank}"
        raise BadInput(f"{where}.id = {shown} is no worker's id")


def _text(field: str, value: str) -> None:
    _at_most(field, value, MAX_TEXT, "characters")


def _at_most(field: str, found: Sized, most: int, what: str = "entries") -> None:
    if len(found) > most:
        raise BadInput(f"{field} has {len(found)} {what}, at most {most} are taken")
