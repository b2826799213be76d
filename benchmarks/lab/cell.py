"""One cell of a table: a model trained by a method over links of one rate, its workers started, watched and ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from lab.network import DEVICE, Network
from lab.options import Method, Rate
from lab.trace import LOWEST_MBIT_S, Trace

WORKER: Final = Path(__file__).resolve().parent.parent / "scripts" / "wan_train.py"
READY_S: Final = 120.0  # imports, data, model, meeting
SILENT_S: Final = 120.0  # no worker finishes a step for this long, and the time of COPIES: it hangs
COPIES: Final = 4  # of the parameters over the thinnest link: more than any method sends in a step
ENDING_S: Final = 60.0  # from the last step to the end of the process
PORT_FIRST: Final = 29500
LAST_WORDS: Final = 2000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a cell trains."""

    model: str
    method: Method
    workers: int
    rate: Rate
    rtt_ms: float
    steps: int
    max_s: float  # of training; then the cell is ended as it is
    batch: int = 0  # a worker's samples; 0: the model's own
    tiny: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    at_s: float  # since the start, when this worker finished it
    loss: float
    sent_bytes: int  # since the start
    beyond_bytes: int  # peak memory beyond data, model and optimizer


@dataclass(slots=True)
class CellRecord:
    """What the workers told, by rank."""

    work: Work
    steps: list[list[Step]]
    parameter_bytes: int = 0
    ready: set[int] = field(default_factory=set)
    done: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    ended: str = ""  # why it ended before all steps were done; empty: it did them all

    @property
    def complete(self) -> int:
        """Steps that every worker has finished."""
        return min(map(len, self.steps))

    def take(self, rank: int, told: Mapping[str, Any]) -> None:
        match told["event"]:
            case "ready":
                self.ready.add(rank)
                self.parameter_bytes = told["parameter_bytes"]
            case "step":
                self.steps[rank].append(Step(told["at_s"], told["loss"], told["sent_bytes"], told["beyond_bytes"]))
            case "done":
                self.done[rank] = told


class Workers:
    """The processes of one cell. All are gone when the `with` block ends."""

    def __init__(self, network: Network, work: Work, port: int) -> None:
        self._told: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._errors: list[IO[str]] = []
        self._network, self._work, self._port = network, work, port

    def __enter__(self) -> Workers:
        try:
            for rank in range(self._work.workers):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        work = self._work
        asked = {
            "model": work.model, "method": work.method.text, "steps": work.steps, "batch": work.batch,
            "tiny": work.tiny, "device": DEVICE, "parent": os.getpid(), "ready_s": READY_S,
        }  # fmt: skip
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(work.workers), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._network.address(0), "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE,
        }  # fmt: skip
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self._errors.append(errors)
        process = subprocess.Popen(
            self._network.inside(rank, [sys.executable, str(WORKER), json.dumps(asked)]),
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        self._processes.append(process)
        reader = threading.Thread(target=self._read, args=(rank, process), name=f"reader-{rank}")
        self._readers.append(reader)
        reader.start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._told.put((rank, line))
        self._told.put((rank, None))

    def next(self, deadline: float) -> tuple[int, Mapping[str, Any] | None] | None:
        """What a worker told next, (rank, None) where one has ended, or None when the deadline is over."""
        try:
            rank, line = self._told.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            return rank, None
        told: Mapping[str, Any] = json.loads(line)
        return rank, told

    def begin(self) -> None:
        """Training starts. A worker that has ended meanwhile shows in `next`."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
            except BrokenPipeError:
                continue

    def exit_code(self, rank: int, wait_s: float) -> int | None:
        """None: still running after that long."""
        try:
            return self._processes[rank].wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self, rank: int) -> str:
        """The last line of what it wrote on stderr, torch's warnings left out."""
        errors = self._errors[rank]
        errors.seek(0)
        lines = [line for line in errors.read()[-LAST_WORDS:].strip().splitlines() if not line.startswith("[W")]
        return lines[-1] if lines else "nothing on stderr"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(ENDING_S)
        for reader in self._readers:
            reader.join(ENDING_S)  # ends with the process's last pipe
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for errors in self._errors:
            errors.close()


def run(network: Network, work: Work, trace: Trace, number: int) -> CellRecord:
    """Train one cell. Links are unshaped until all workers are ready. number: of the cell in this laboratory."""
    record = CellRecord(work, [[] for _ in range(work.workers)])
    with Workers(network, work, PORT_FIRST + number % 1000) as workers:
        record.ended = _until_ready(workers, record)
        if not record.ended:
            with network.shaped(work.rate, trace):
                workers.begin()
                record.ended = _until_done(workers, record)
    return record


def _until_ready(workers: Workers, record: CellRecord) -> str:
    deadline = time.monotonic() + READY_S
    while len(record.ready) < record.work.workers:
        told = workers.next(deadline)
        if told is None:
            return f"not ready after {READY_S:g} s: workers {sorted(set(range(record.work.workers)) - record.ready)}"
        if told[1] is None:
            return _fell(workers, told[0])
        record.take(told[0], told[1])
    return ""


def _until_done(workers: Workers, record: CellRecord) -> str:
    """Why it ended early, empty if it did not."""
    ends = time.monotonic() + record.work.max_s
    silent_s = SILENT_S + COPIES * record.parameter_bytes * 8e-6 / (record.work.rate.mbit_s or LOWEST_MBIT_S)
    quiet = time.monotonic() + silent_s
    left = set(range(record.work.workers))
    while left:
        told = workers.next(min(quiet, ends))
        if told is None and time.monotonic() < quiet:
            return f"{record.work.max_s:g} s were over"
        if told is None:
            return f"hangs: no step for {silent_s:.0f} s after step {record.complete}"
        rank, words = told
        if words is None:
            if rank not in record.done or workers.exit_code(rank, ENDING_S):
                return _fell(workers, rank)
            left.discard(rank)
            continue
        record.take(rank, words)
        if record.complete == record.work.steps:  # what is left is the end of the processes, which is not timed
            ends = quiet = time.monotonic() + ENDING_S
        else:
            quiet = time.monotonic() + silent_s
    return ""


def _fell(workers: Workers, rank: int) -> str:
    code = workers.exit_code(rank, ENDING_S)
    return f"worker {rank} ended with {code}: {workers.last_words(rank)}"
