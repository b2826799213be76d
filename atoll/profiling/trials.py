"""One trial: the user's script as N workers of this machine, started, watched and ended; what their files say."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from atoll.agent.ports import RendezvousPorts
from atoll.agent.runtime.step.state.fingerprint import fingerprint_of
from atoll.agent.supervisor.environment import PLACE
from atoll.errors import AtollError, BadInput, DeadlineExceeded, JobFailed
from atoll.host import die_with_parent
from atoll.jobs.exit_codes import PEER_LOST
from atoll.profiling.losses import StepLoss

PREPARED_S: Final = 300.0  # imports, reading data, building the model
SILENT_S: Final = 300.0  # no worker finishes a step for this long: it hangs
ENDING_S: Final = 60.0
"""The longest time from the last step, or from the first failure, to the end of the process."""
_LOOK_S: Final = 0.5
_LAST_LINES: Final = 8
_LAST_BYTES: Final = 16 * 1024


class ScriptFailed(JobFailed):
    """The script did not live to the trial's end. `last_lines`: of what it wrote."""

    def __init__(self, message: str, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.last_lines = tuple(last_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How the script is started."""

    script: Path
    args: tuple[str, ...]
    env: Mapping[str, str]
    logs: Path
    """Folder for what the workers of the newest trial print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """steps: that train; 0: only look at what the script prepares. judged_steps: behind them, to judge the model by.
    sparsity None: neither compression nor staleness."""

    workers: int
    steps: int = 0
    judged_steps: int = 0
    batch: int = 0
    sparsity: float | None = None
    stale_sparse: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    seed: int = 0
    learning_rate_factor: float = 1.0

    @property
    def all_steps(self) -> int:
        return self.steps + self.judged_steps

    def __str__(self) -> str:
        if self.steps == 0:
            return "before training"
        return f"batch {self.batch}, " + ("dense" if self.sparsity is None else f"sparsity {self.sparsity:g}")


@dataclass(slots=True)
class Told:
    """What one worker wrote."""

    prepared: Mapping[str, Any] | None = None
    steps: list[StepLoss] = field(default_factory=list)
    judged: list[StepLoss] = field(default_factory=list)
    ended: Mapping[str, Any] | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        match line["event"]:
            case "prepared":
                self.prepared = line
            case "step" | "judged" as event:
                seen = StepLoss(line["step"], line["local"], line["loss"])
                (self.steps if event == "step" else self.judged).append(seen)
            case "end":
                self.ended = line


def run(command: Command, trial: Trial, folder: Path, progress: Callable[[int], None]) -> list[Told]:
    """Carry the trial out. folder: empty, for the workers' files. progress: told how many steps are done.

    Returns by rank. Raises ScriptFailed, BadInput for a script that does not use Atoll, DeadlineExceeded for one that
    hangs. When this returns or raises, none of the processes is left."""
    with _Workers(command, trial, folder) as workers:
        told = workers.until_ended(progress)
    check(command, trial, told)
    return told


def check(command: Command, trial: Trial, told: Sequence[Told]) -> None:
    """All workers ended well: did they do what was asked? told: by rank. Raises BadInput."""
    for rank, one in enumerate(told):
        if one.prepared is None:
            raise BadInput(
                f"{command.script} ended without run.prepare; only scripts that train through atoll.init and "
                f"run.prepare can be profiled. Its output: {command.logs / f'rank-{rank}.log'}"
            )
        if trial.steps and not one.steps:
            raise BadInput(
                f"{command.script} trained without run.backward(loss), so nobody told its losses. Call it in place of "
                "loss.backward()"
            )
        if trial.steps and one.ended is None:
            raise BadInput(
                f"{command.script} ended by itself after {len(one.steps) + len(one.judged)} of {trial.all_steps} steps "
                f"({trial}). Let it train for more epochs, or give fewer --samples"
            )


def description_of(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a profile's `model` from what a worker told of its script."""
    trained = [shape for _, shape, _, trains in prepared["parameters"] if trains]
    return {
        "fingerprint": fingerprint_of(prepared),
        "tensors": len(prepared["parameters"]),
        "entries": sum(_product(shape) for shape in trained),
        "samples": prepared["samples"],
        "optimizer": str(prepared["optimizer"]["kind"])[:256],
    }


def _product(shape: Sequence[int]) -> int:
    entries = 1
    for extent in shape:
        entries *= extent
    return entries


class _Workers:
    """The processes of one trial."""

    def __init__(self, command: Command, trial: Trial, folder: Path) -> None:
        self._command, self._trial, self._folder = command, trial, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []
        self._tails = [_Tail(folder / f"rank-{rank}.jsonl") for rank in range(trial.workers)]

    def __enter__(self) -> _Workers:
        ports = RendezvousPorts()
        try:
            port = ports.held[0]
            ports.release(port)
            for rank in range(self._trial.workers):
                self._start(rank, port)
        except BaseException:
            self._end()
            raise
        finally:
            ports.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self, rank: int, port: int) -> None:
        trial, command = self._trial, self._command
        asked = {
            "directory": str(self._folder.absolute()), "steps": trial.steps, "judged_steps": trial.judged_steps,
            "batch": trial.batch, "sparsity": trial.sparsity, "seed": trial.seed,
            "stale_sparse": dict(trial.stale_sparse), "learning_rate_factor": trial.learning_rate_factor,
        }  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
        threads = str(max(1, (os.cpu_count() or 1) // trial.workers))
        env = {"OMP_NUM_THREADS": threads, **inherited, **command.env, "PYTHONUNBUFFERED": "1"}
        env = {name: value for name, value in env.items() if name not in PLACE}
        env |= {"ATOLL_PROBE": json.dumps(asked)}
        if trial.workers > 1:
            env |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(trial.workers),
                "LOCAL_WORLD_SIZE": str(trial.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        with self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                die_with_parent.command([sys.executable, str(command.script), *command.args], signal.SIGKILL),
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        self._pidfds.append(os.pidfd_open(process.pid))

    def _log(self, rank: int) -> Path:
        return self._command.logs / f"rank-{rank}.log"

    def until_ended(self, progress: Callable[[int], None]) -> list[Told]:
        steps = -1
        deadline = time.monotonic() + PREPARED_S
        while (left := self._running()) and not any(self._codes().values()):
            select.select(left, [], [], _LOOK_S)
            for tail in self._tails:
                tail.read()
            done = min(len(tail.told.steps) + len(tail.told.judged) for tail in self._tails)
            if done > steps and all(tail.told.prepared for tail in self._tails):
                steps = done
                progress(done)
                ending = self._trial.all_steps <= done
                deadline = time.monotonic() + (ENDING_S if ending else SILENT_S)
            if time.monotonic() > deadline:
                raise self._late()
        for tail in self._tails:
            tail.read()
        self._check_exits()
        return [tail.told for tail in self._tails]

    def _running(self) -> list[int]:
        """Return the descriptors of the workers that have not ended."""
        return [fd for fd, process in zip(self._pidfds, self._processes, strict=True) if process.poll() is None]

    def _codes(self) -> dict[int, int | None]:
        """Return each rank's exit code; None where it had not ended at the last look."""
        return {rank: process.returncode for rank, process in enumerate(self._processes)}

    def _check_exits(self) -> None:
        if not any(self._codes().values()):
            return
        ends_s = time.monotonic() + ENDING_S
        while (left := self._running()) and culprit(self._codes()) is None and time.monotonic() < ends_s:
            select.select(left, [], [], _LOOK_S)
        codes = {rank: code for rank, code in self._codes().items() if code}
        rank = culprit(codes)
        assert rank is not None
        how = f"exit code {codes[rank]}" if codes[rank] > 0 else f"signal {signal.Signals(-codes[rank]).name}"
        raise ScriptFailed(
            f"{self._command.script} ended with {how} ({self._trial}, worker {rank}). Its output: {self._log(rank)}",
            last_lines(self._log(rank)),
        )

    def _late(self) -> AtollError:
        if any(tail.told.prepared is None for tail in self._tails):
            return BadInput(
                f"{self._command.script} did not come to run.prepare within {PREPARED_S:.0f} s. Does it use atoll? Its "
                f"output: {self._log(0)}"
            )
        return DeadlineExceeded(
            f"{self._command.script} finished no step for {SILENT_S:.0f} s ({self._trial}). Its output: {self._log(0)}"
        )

    def _end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a script left behind, its loader's workers above all
        for process in self._processes:
            process.wait(timeout=10)
        for fd in self._pidfds:
            os.close(fd)
        for tail in self._tails:
            tail.close()
        self._processes, self._pidfds = [], []


class _Tail:
    """A file that grows, line by line."""

    def __init__(self, path: Path) -> None:
        self.told = Told()
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def read(self) -> None:
        for line in self._lines():
            try:
                self.told.take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise AtollError(
                    f"a worker wrote {line[:80]!r} into {self._path.name}, which is no line of a trial. Does the "
                    "script call atoll.init more than once at a time?"
                ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> Iterator[bytes]:
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open("rb")
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        yield from lines


def culprit(codes: Mapping[int, int | None]) -> int | None:
    """Return the rank that made the trial fail. Pure.

    codes: by rank; None of a worker that still runs. A worker that lost a peer is not to blame. Returns None where no
    worker failed, or where the peer that was lost is still ending: it may take longer than those that lost it."""
    failed = [rank for rank, code in codes.items() if code and code != PEER_LOST]
    if not failed and None not in codes.values():
        failed = [rank for rank, code in codes.items() if code]
    return min(failed, default=None)


def last_lines(log: Path) -> list[str]:
    """The end of a worker's output."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
