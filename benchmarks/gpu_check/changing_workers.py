"""Stage 8: a local cluster of agents that share the device; a worker is killed (SIGKILL), and another one joins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from held_ports import free_port

from atoll.agent.telemetry.devices import find_devices
from atoll.agent.telemetry.gauges import gauges_of
from atoll.client.client import AsyncClient
from atoll.jobs.code_bundle import pack
from atoll.v1 import common_pb2
from atoll.v1 import jobs_pb2 as pb
from gpu_check.rows import Measured, Rows
from gpu_check.shared_device import MAX_DEVIATION, Plan, off_reference, ranks_weights, write_reference
from gpu_check.training_steps import Shape

SCRIPT: Final = Path(__file__).resolve().parents[1] / "scripts" / "gpu_changing_train.py"
AGENTS: Final = 3
EXACT: Final = "dense"
"""It has to end with plain torch's weights."""
STRATEGIES: Final = (EXACT, "local-steps")
SHAPES: Final = {
    "cuda": Shape("2 M", width=128, layers=4, heads=4, context=64, vocabulary=4096, batch=12),
    "cpu": Shape("0.1 M", width=64, layers=2, heads=2, context=32, vocabulary=256, batch=12),
}
EPOCH_STEPS: Final = 100
EPOCHS: Final = 10_000
"""More than are trained: OUT/last-epoch ends it."""
SAMPLE_S: Final = 0.01
KILLED: Final = 1
"""Rank."""
KILLED_BETWEEN: Final = (40, 70)
"""Steps of an epoch. `local-steps` goes back to the newest state in memory, some ten steps, and in place only within an
epoch."""
JOINED_STEPS: Final = 10
"""Steps of the worker that joins, after which training may end."""
UP_LIMIT_S: Final = {"cuda": 45.0, "cpu": 90.0}
"""Until the cluster is ready, and until it has ended."""
STEP_LIMIT_S: Final = {"cuda": 30.0, "cpu": 90.0}
"""Until a job trains, goes on after the kill, has the joiner, ends; each."""
FREED_WITHIN_S: Final = 5.0
MAX_LEAKED_MIB: Final = 16.0


def run(device: str, rows: Rows) -> None:
    before_mib = used_mib() if device == "cuda" else 0.0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        asyncio.run(_trials(device, out, rows))
        if device == "cuda":
            _check_memory(before_mib, rows)
        else:
            rows.skip("memory of the GPU", "the check runs without a GPU")
        if (out / EXACT / "rank-0.pt").exists():
            _compare(device, out / EXACT, rows)


def _check_memory(before_mib: float, rows: Rows) -> None:
    ends_s = time.monotonic() + FREED_WITHIN_S
    while (after_mib := used_mib()) > before_mib + MAX_LEAKED_MIB and time.monotonic() < ends_s:
        time.sleep(0.1)  # the driver frees a context's memory some time after its process has ended
    text = f"{before_mib:.0f} MiB in use before, {after_mib:.0f} MiB after"
    freed = after_mib <= before_mib + MAX_LEAKED_MIB
    rows.check("memory of the GPU", freed, text, before_mib=before_mib, after_mib=after_mib)


def _compare(device: str, out: Path, rows: Rows) -> None:
    """Hold the weights that the changing workers ended with against plain torch on the same whole batches."""
    epochs = _lines(out, 0)[-1]["epoch"] + 1
    write_reference(Plan(SHAPES[device], EPOCH_STEPS), device, epochs, out)
    off = off_reference(torch.load(out / "rank-0.pt", weights_only=True), out)
    text = f"off by {off:.1e} after {epochs * EPOCH_STEPS} steps"
    rows.check(f"{EXACT} against plain torch", off <= MAX_DEVIATION, text, deviation=off)


def used_mib() -> float:
    """Return what all processes use of the first GPU, as NVML reports it; this process has no context there yet."""
    gauges = gauges_of(find_devices())
    used_bytes = gauges.read()[0].memory_used_bytes
    gauges.close()
    return used_bytes / 2**20


async def _trials(device: str, folder: Path, rows: Rows) -> None:
    began_s = time.monotonic()
    async with _cluster(device, folder) as address, AsyncClient([address], timeout_s=10.0) as client:
        nodes = (await client.nodes()).nodes
        took_s = time.monotonic() - began_s
        found = [one for node in nodes for one in node.devices]
        said = sorted({f"{one.kind} {one.uuid} shared by {one.sharers}" for one in found})
        agreed = len(said) == 1 and all((one.kind, one.sharers) == ("cuda", AGENTS) for one in found)
        memory_gib = sum(one.memory_bytes for one in found) / 2**30
        shared = f": {', '.join(said)}, {memory_gib:.1f} GiB together" if device == "cuda" else ""
        right = len(nodes) == AGENTS and (agreed or device == "cpu")
        rows.check("atoll up", right, f"{len(nodes)} agents in {took_s:.1f} s{shared}", seconds=took_s)
        for strategy in STRATEGIES:
            holds, text, figures = await _outcome(client, device, strategy, folder / strategy)
            rows.check(strategy, holds, text, **figures)


@asynccontextmanager
async def _cluster(device: str, folder: Path) -> AsyncIterator[str]:
    """Run `atoll up`; yield its address. Prints what its daemons said where this fails."""
    address = f"127.0.0.1:{free_port()}"
    options = ("--agents", str(AGENTS), "--listen", address, "--data-dir", str(folder / "up"), "--threads", "1")
    share = ("--share-gpu",) if device == "cuda" else ()
    command = (sys.executable, "-P", "-m", "atoll.cli.main", "up", *options, *share)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(UP_LIMIT_S[device]):
            if not (await process.stdout.readline()).startswith(b"ready"):
                raise RuntimeError("`atoll up` ended before it was ready")
        yield address
    finally:
        if sys.exception() is not None:
            _print_logs(folder / "up")
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(UP_LIMIT_S[device]):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _print_logs(data: Path) -> None:
    for log in sorted((data / "logs").glob("*.log")):
        print(f"---- {log.name}\n{log.read_text(errors='replace')[-2000:]}")


@dataclass(frozen=True, slots=True)
class Trial:
    """A job that lost a worker, went on as the same processes, was joined by another worker, and ended."""

    out: Path
    killed_s: float
    survivors: frozenset[int]
    """Ranks."""
    joiner: int


async def _outcome(client: AsyncClient, device: str, strategy: str, out: Path) -> Measured:
    """Train a job that loses a worker and is joined by another one; return its row."""
    job = ""
    try:
        out.mkdir()
        code = pack(SCRIPT)
        spec = common_pb2.JobSpec(
            name=strategy,
            script=code.script,
            args=[str(out)],
            min_workers=AGENTS - 1,
            max_workers=AGENTS,
            strategy=strategy,
        )
        job = await client.submit(spec, code.data)
        return _judged(await _trial(client, job, out, STEP_LIMIT_S[device]), device)
    except Exception:  # noqa: BLE001 - whatever a trial raises is its result
        why = traceback.format_exc()
        if job:
            story = [event.text async for event in client.events(job)]
            said = b"".join([chunk.data async for chunk in client.logs(job)]).decode(errors="replace")
            print("\n".join([f"---- {job}", *story, said[-3000:]]))
            await client.cancel(job)
        return False, why, {}


async def _trial(client: AsyncClient, job: str, out: Path, limit_s: float) -> Trial:
    def is_in_mid_epoch(now: pb.Job) -> bool:
        first, last = KILLED_BETWEEN
        return len(now.workers) == AGENTS and first <= now.progress.step % EPOCH_STEPS <= last

    begun = await _seen(client, job, "trains in the middle of an epoch", limit_s, is_in_mid_epoch)
    pids = {worker.rank: worker.status.pid for worker in begun.workers}
    killed_s = time.monotonic()
    os.kill(pids.pop(KILLED), signal.SIGKILL)

    def is_joined(now: pb.Job) -> bool:
        if now.run != begun.run:
            raise RuntimeError(f"RESTARTED as run {now.run}: {now.reason}")
        new = [worker.rank for worker in now.workers if worker.rank not in pids]
        return len(now.workers) == AGENTS and any(_trained(out, rank, killed_s) >= JOINED_STEPS for rank in new)

    joined = await _seen(client, job, "is joined by a worker", 2 * limit_s, is_joined)
    now = {worker.rank: worker.status.pid for worker in joined.workers}
    if not pids.items() <= now.items():
        raise RuntimeError(f"survivors were REPLACED: processes by rank {pids} before, {now} after")
    _end_after_next_epoch(out)
    end = await client.wait(job, limit_s)
    if (end.phase, end.run) != (pb.PHASE_DONE, begun.run):
        raise RuntimeError(f"run {end.run} ended as {pb.Phase.Name(end.phase)}: {end.reason}")
    (joiner,) = now.keys() - pids.keys()
    return Trial(out, killed_s, frozenset(pids), joiner)


async def _seen(
    client: AsyncClient, job: str, what: str, limit_s: float, condition: Callable[[pb.Job], bool]
) -> pb.Job:
    """Return the job as soon as it meets the condition."""
    last = pb.Job()
    try:
        async with asyncio.timeout(limit_s), aclosing(client.watch(job)) as changes:
            async for last in changes:
                if condition(last):
                    return last
    except TimeoutError as error:
        raise RuntimeError(f"not within {limit_s:g} s: {job} {what}; last seen {last.reason!r}") from error
    raise RuntimeError(f"{job} ended before it {what}: {last.reason}")


def _lines(out: Path, rank: int) -> list[dict[str, Any]]:
    path = out / f"steps-{rank}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]  # the last one may be half written


def _trained(out: Path, rank: int, since_s: float) -> int:
    return sum(line["at_s"] > since_s for line in _lines(out, rank))


def _end_after_next_epoch(out: Path) -> None:
    """Ranks are a step apart, and an epoch takes seconds: each reads the number before that epoch ends."""
    newest = max(_lines(out, int(path.stem.partition("-")[2]))[-1]["epoch"] for path in out.glob("steps-*.jsonl"))
    part = out / "last-epoch.part"
    part.write_text(str(newest + 1))
    part.rename(out / "last-epoch")


def _judged(trial: Trial, device: str) -> Measured:
    ranks = sorted({*trial.survivors, trial.joiner})
    after = {
        rank: [line for line in _lines(trial.out, rank) if line["at_s"] > trial.killed_s and line["view"] > 1]
        for rank in ranks
    }
    next_s = max(after[rank][0]["at_s"] for rank in trial.survivors) - trial.killed_s
    joined_s = after[trial.joiner][0]["at_s"] - trial.killed_s
    devices = {line["device"] for lines in after.values() for line in lines}
    equal, said, _ = ranks_weights([trial.out / f"rank-{rank}.pt" for rank in ranks])
    text = (
        f"in place on {', '.join(sorted(devices))}: next step {next_s:.1f} s after the kill, "
        f"rank {trial.joiner} trains after {joined_s:.1f} s; {said}"
    )
    right = equal and all(one.startswith(device) for one in devices)
    return right, text, {"next_step_s": next_s, "joined_s": joined_s}
