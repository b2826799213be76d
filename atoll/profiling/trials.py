"""Trials of `atoll profile`: the user's script as N workers of this machine, started, watched and ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.agent.runtime.step.state.fingerprint import fingerprint_of
from atoll.agent.supervisor.processes import exits
from atoll.agent.supervisor.processes.environment import TORCHRUN_VARIABLES
from atoll.errors import AtollError, BadInput, DeadlineExceeded, JobFailed
from atoll.errors.exit_codes import PEER_LOST
from atoll.host import die_with_parent
from atoll.host.ports import hold_port

PREPARE_TIMEOUT_S: Final = 300.0
"""Seconds for imports, reading data and building the model."""
SILENCE_TIMEOUT_S: Final = 300.0
"""Seconds without a finished step after which a worker hangs."""
ENDING_TIMEOUT_S: Final = 60.0
"""Seconds from the last step, or from the first failure, to the end of all processes."""
SMOOTHING: Final = 0.99
"""Share of the mean loss that is left after a step of the reference batch (StellaTrain, Algorithm 1)."""
_POLL_S: Final = 0.5
_QUOTED_LINES: Final = 8
_QUOTED_BYTES: Final = 16 * 1024


Worker = subprocess.Popen[bytes]


class ScriptFailed(JobFailed):
    """The script failed before the trial's end. `last_lines`: the end of its output."""

    def __init__(self, message: str, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.last_lines = tuple(last_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of the script. logs: folder for the output of the newest trial's workers."""

    script: Path
    args: tuple[str, ...]
    env: Mapping[str, str]
    logs: Path

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Work of the workers. steps: to train; 0: they only describe what the script prepares. judged_steps: after those,
    with which the model is judged. sparsity: with this strategy and these settings; None: without compression.
    timed_for: workers that would share the script's batch, whose steps the one worker times; 0: nothing is timed."""

    workers: int
    steps: int = 0
    judged_steps: int = 0
    batch: int = 0
    sparsity: float | None = None
    strategy: str = ""
    settings: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    seed: int = 0
    learning_rate_factor: float = 1.0
    timed_for: int = 0

    @property
    def all_steps(self) -> int:
        return self.steps + self.judged_steps

    def __str__(self) -> str:
        if self.timed_for:
            return "timing steps"
        if self.steps == 0:
            return "before training"
        return f"batch {self.batch}, " + ("dense" if self.sparsity is None else f"sparsity {self.sparsity:g}")


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Mean loss of one rank over its `samples` of a step's batch."""

    step: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Report of one worker: what it prepares, its losses, and whether it came to the trial's end.

    script, timed, gradient_density: of a trial that times steps, as session/step_timing.py writes them."""

    prepared: Mapping[str, Any] | None = None
    steps: Sequence[StepLoss] = ()
    judged: Sequence[StepLoss] = ()
    ended: bool = False
    script: Mapping[str, Any] | None = None
    timed: Sequence[Mapping[str, Any]] = ()
    gradient_density: float | None = None

    @property
    def done(self) -> int:
        """Return the number of finished steps."""
        return len(self.steps) + len(self.judged) + len(self.timed)

    @classmethod
    def read(cls, folder: Path, rank: int) -> WorkerReport:
        """Read everything that the worker has written so far."""
        path = folder / f"rank-{rank}.jsonl"
        *written, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # the last line may be half written
        prepared, ended, script, density = None, False, None, None
        losses: dict[str, list[StepLoss]] = {"step": [], "judged": []}
        timed = []
        for line in written:
            try:
                told = json.loads(line)
                if told["event"] == "prepared":
                    prepared = told
                elif told["event"] == "end":
                    ended = True
                elif told["event"] == "script":
                    script = told
                elif told["event"] == "timed":
                    timed.append(told)
                elif told["event"] == "density":
                    density = told["gradient_density"]
                else:
                    losses[told["event"]].append(StepLoss(told["step"], told["local"], told["loss"]))
            except (ValueError, KeyError, TypeError) as error:
                raise AtollError(
                    f"a worker wrote {line[:80]!r} into {path.name}, which is no line of a trial. Does the "
                    "script call atoll.init more than once at a time?"
                ) from error
        return cls(prepared, losses["step"], losses["judged"], ended, script, timed, density)


def run(command: Command, trial: Trial, folder: Path, progress: Callable[[int], None]) -> list[WorkerReport]:
    """Carry the trial out; return the workers' reports by rank.

    folder: empty, for the workers' files. progress: called with the number of finished steps. Raises ScriptFailed,
    BadInput for a script that does not use Atoll, DeadlineExceeded for one that hangs. None of the processes is left
    afterwards."""
    with _started(command, trial, folder) as workers:
        reports = _watch(command, trial, folder, workers, progress)
    check(command, trial, reports)
    return reports


def check(command: Command, trial: Trial, reports: Sequence[WorkerReport]) -> None:
    """Raise BadInput if workers that ended well did not do their part. reports: by rank."""
    for rank, one in enumerate(reports):
        if one.prepared is None:
            raise BadInput(
                f"{command.script} ended without run.prepare; only scripts that train through atoll.init and "
                f"run.prepare can be {'measured' if trial.timed_for else 'profiled'}. Its output: {command.log(rank)}"
            )
        if trial.steps and not one.steps:
            raise BadInput(
                f"{command.script} trained without run.backward(loss), so no loss was reported. Call it in place of "
                "loss.backward()"
            )
        if trial.steps and not one.ended:
            raise BadInput(
                f"{command.script} ended by itself after {one.done} of {trial.all_steps} steps "
                f"({trial}). Let it train for more epochs, or give fewer --samples"
            )


def description_of(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a profile's `model` for what a worker prepared."""
    return {
        "fingerprint": fingerprint_of(prepared),
        "tensors": len(prepared["parameters"]),
        "entries": sum(math.prod(shape) for _, shape, _, trains in prepared["parameters"] if trains),
        "samples": prepared["samples"],
        "optimizer": str(prepared["optimizer"]["kind"])[:256],
    }


def whole_batches(ranks: Iterable[Sequence[StepLoss]]) -> list[tuple[int, float]]:
    """Return (samples, mean loss) of each step's whole batch, in order. A rank without samples does not count."""
    samples: dict[int, int] = {}
    total: dict[int, float] = {}
    for seen in (seen for rank in ranks for seen in rank if seen.samples > 0):
        samples[seen.step] = samples.get(seen.step, 0) + seen.samples
        total[seen.step] = total.get(seen.step, 0.0) + seen.samples * seen.loss
    return [(samples[step], total[step] / samples[step]) for step in sorted(samples)]


def mean(batches: Sequence[tuple[int, float]]) -> float:
    """Return the mean loss over all samples; NaN where there are none."""
    samples = sum(count for count, _ in batches)
    return sum(count * loss for count, loss in batches) / samples if samples else math.nan


def smoothed(batches: Sequence[tuple[int, float]], reference_batch: int) -> float:
    """Return the running mean of the training loss at its end; NaN or inf where training diverged.

    Algorithm 1 smooths by steps: large batches would be judged by more samples, and by more of their beginning. Here
    every sample counts alike: a batch of b leaves 0.99^(b / reference_batch) of the mean before it. And the mean starts
    with the first loss, not at 0.
    """
    average = weight = 0.0
    for samples, loss in batches:
        if not math.isfinite(loss):
            return loss
        kept = SMOOTHING ** (samples / reference_batch)
        average = kept * average + (1 - kept) * loss
        weight = kept * weight + (1 - kept)
    return average / weight if weight else math.nan


@contextlib.contextmanager
def _started(command: Command, trial: Trial, folder: Path) -> Iterator[list[Worker]]:
    """Start the workers, by rank; kill what is left of them and their children at the end."""
    workers: list[Worker] = []
    try:
        with hold_port() as held:
            port = held.getsockname()[1]
            workers.extend(_start(command, trial, folder, rank, port) for rank in range(trial.workers))
            yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # also children of the script, such as a loader's workers
        for worker in workers:
            worker.wait(timeout=10)


def _start(command: Command, trial: Trial, folder: Path, rank: int, port: int) -> Worker:
    asked = asdict(trial) | {"directory": str(folder.absolute())}
    size = asked.pop("workers")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    threads = str(max(1, (os.cpu_count() or 1) // size))
    env = {"OMP_NUM_THREADS": threads, **inherited, **command.env, "PYTHONUNBUFFERED": "1"}
    env = {name: value for name, value in env.items() if name not in TORCHRUN_VARIABLES}
    env["ATOLL_PROBE"] = json.dumps(asked)
    if size > 1:
        env |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    with command.log(rank).open("wb") as log:
        return subprocess.Popen(
            die_with_parent.command([sys.executable, str(command.script), *command.args], signal.SIGKILL),
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _watch(
    command: Command, trial: Trial, folder: Path, workers: Sequence[Worker], progress: Callable[[int], None]
) -> list[WorkerReport]:
    """Wait until all workers have ended; return their reports. Raises ScriptFailed and DeadlineExceeded."""
    steps, failed, deadline_s = -1, False, time.monotonic() + PREPARE_TIMEOUT_S
    while any(running := [worker for worker in workers if worker.poll() is None]):
        codes = {rank: worker.returncode for rank, worker in enumerate(workers)}
        if any(codes.values()) and not failed:
            failed, deadline_s = True, time.monotonic() + ENDING_TIMEOUT_S
        if failed and (culprit(codes) is not None or time.monotonic() > deadline_s):
            break
        reports = [WorkerReport.read(folder, rank) for rank in range(trial.workers)]
        prepared, done = all(one.prepared for one in reports), min(one.done for one in reports)
        if prepared and done > steps:
            steps = done
            progress(done)
            if not failed:
                ends = trial.all_steps <= done and not trial.timed_for
                deadline_s = time.monotonic() + (ENDING_TIMEOUT_S if ends else SILENCE_TIMEOUT_S)
        if time.monotonic() > deadline_s:
            raise _late(command, trial, prepared=prepared)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(_POLL_S)
    failures = {rank: worker.returncode for rank, worker in enumerate(workers) if worker.returncode}
    if (rank := culprit(failures)) is not None:
        code, log = failures[rank], command.log(rank)
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise ScriptFailed(
            f"{command.script} ended with {how} ({trial}, worker {rank}). Its output: {log}", last_lines(log)
        )
    return [WorkerReport.read(folder, rank) for rank in range(trial.workers)]


def _late(command: Command, trial: Trial, *, prepared: bool) -> AtollError:
    script, log = command.script, command.log(0)
    if prepared:
        return DeadlineExceeded(f"{script} finished no step for {SILENCE_TIMEOUT_S:.0f} s ({trial}). Its output: {log}")
    return BadInput(
        f"{script} did not come to run.prepare within {PREPARE_TIMEOUT_S:.0f} s. Does it use atoll? Its output: {log}"
    )


def culprit(codes: Mapping[int, int | None]) -> int | None:
    """Return the rank that made the trial fail. Pure.

    codes: by rank; None of a worker that still runs. A worker that lost a peer is not to blame. Returns None where no
    worker failed, or where the peer that was lost is still ending: it may take longer than those that lost it."""
    failed = [rank for rank, code in codes.items() if code and code != PEER_LOST]
    if not failed and None not in codes.values():
        failed = [rank for rank, code in codes.items() if code]
    return min(failed, default=None)


def last_lines(log: Path) -> list[str]:
    """Return the end of a worker's output."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _QUOTED_BYTES))
        return exits.last_lines(file.read(), _QUOTED_LINES)
