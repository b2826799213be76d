"""Stage 5: checkpoints of a GPT while it trains: to disk and to memory, a SIGKILL and a resume, a stuck device."""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from zmq_agent import FakeAgent, Worker, start_process

from atoll.agent.runtime.checkpoints.disk import listing
from gpu_check.atoll_runs import import_everything
from gpu_check.rows import Measured, Rows

SCRIPT: Final = Path(__file__).resolve().parents[1] / "scripts" / "gpu_checkpoints_train.py"
STEPS: Final = 30
EVERY: Final = 10
"""Steps between two checkpoints on disk."""
KILLED_AFTER: Final = 6
STUCK_AT: Final = 4
GRACE_S: Final = 8.0
ROW_LIMIT_S: Final = {"cuda": 35.0, "cpu": 120.0}
LARGE, SMALL = 0, -1
"""Places in the device's shapes."""

Line = dict[str, Any]


def run(device: str, rows: Rows) -> None:
    import_everything()
    for name, call in (
        ("to memory", _to_memory), ("to disk", _to_disk), ("SIGKILL and resume", _resumed), ("stuck device", _stuck),
    ):  # fmt: skip
        rows.measure(name, partial(call, device), ROW_LIMIT_S[device])


class Job:
    """Runs of one job of one worker, on the device of the check."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder, self.runs = device, folder, 0
        self.lines_path = folder / "lines"

    def agent(self, *, every_steps: int = 0, memory: Path | None = None) -> FakeAgent:
        self.runs += 1
        agent = FakeAgent(self.folder, run=self.runs, start=self._start)
        agent.spec.checkpoint.every_steps = every_steps
        if memory is not None:
            agent.memory, agent.memory_bytes = memory, 1 << 36
            agent.spec.checkpoint.memory_replicas = 1
            agent.place(["here"], ["here"])
        return agent

    def begin(self, agent: FakeAgent, shape: int, steps: int, *more: str) -> None:
        agent.start_workers(str(SCRIPT), str(self.lines_path), str(shape), str(steps), *more)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None) -> Worker:
        own = dict(environment)
        if self.device == "cuda":
            del own["CUDA_VISIBLE_DEVICES"]  # tests hide it
        return start_process(command, own, log)

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.lines_path.read_text().splitlines()]


def _to_memory(device: str) -> Measured:
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=parent) as memory:
        job = Job(device, Path(folder))
        with job.agent(memory=Path(memory)) as agent:
            job.begin(agent, LARGE, STEPS)
            if agent.exit_codes() != [0]:
                return False, agent.said(), {}
            kept = agent.memory_steps.get(0, 0)
        lines = job.lines()
    costs_ms = [1e3 * line["memory_cost_s"] for line in lines[STEPS // 3 :]]
    times_ms = [1e3 * line["s"] for line in lines[2:]]
    stall_ms, step_ms = statistics.median(costs_ms), statistics.median(times_ms)
    said = "reached" if stall_ms <= 20.0 else "MISSED"
    text = f"step {kept} kept, {stall_ms:.1f} ms each by its own account (goal 20 {said}), step {step_ms:.1f} ms"
    return kept > 0, text, {"stall_ms": stall_ms, "step_ms": step_ms, "longest_step_ms": max(times_ms)}


def _to_disk(device: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(device, Path(folder))
        with job.agent(every_steps=EVERY) as agent:
            job.begin(agent, LARGE, STEPS)
            if agent.exit_codes() != [0]:
                return False, agent.said(), {}
            size_gb = listing.newest(agent.job_directory)[0].state_bytes / 1e9
        lines = job.lines()
    quiet_s = statistics.median(line["s"] for line in lines[2:] if not line["writing"])
    firsts = [line["s"] for line in lines if line["step"] > 0 and line["step"] % EVERY == 0]
    stall_ms = 1e3 * (statistics.median(firsts) - quiet_s)
    busy_s = sum(line["s"] for line in lines if line["writing"])
    speed = f"{size_gb * len(firsts) / busy_s:.2f} GB/s" if busy_s else "written within a step"
    text = f"{size_gb:.2f} GB, {stall_ms:.1f} ms longer step, {speed}, step {1e3 * quiet_s:.1f} ms"
    return size_gb > 0, text, {"stall_ms": stall_ms, "gb": size_gb, "writing_s": busy_s, "step_ms": 1e3 * quiet_s}


def _resumed(device: str) -> Measured:
    """The state that a run resumes with has the hash that the killed run wrote of it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(device, Path(folder))
        with job.agent(every_steps=3) as agent:
            job.begin(agent, SMALL, STEPS, "hash")
            agent.wait_until(lambda: agent.checkpoint_step > 0 and agent.alive.get(0, (0, 0))[0] >= KILLED_AFTER)
            agent.workers[0].send_signal(signal.SIGKILL)
            agent.exit_codes()
        before = {line["step"]: line["hash"] for line in job.lines()}
        job.lines_path.unlink()
        with job.agent(every_steps=3) as agent:
            job.begin(agent, SMALL, STEPS, "hash")
            if agent.exit_codes() != [0]:
                return False, agent.said(), {}
        first = job.lines()[0]
    same = before.get(first["step"]) == first["hash"]
    at = f"killed at {max(before)}, resumed at {first['step']}"
    return same and first["step"] > 0, f"{at}, {'equal' if same else 'DIFFERENT'} hash of model and optimizer", {}


def _stuck(device: str) -> Measured:
    """The device hangs in a step; asked to stop, the worker saves the state of the step before, and ends."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(device, Path(folder))
        with job.agent() as agent:
            job.begin(agent, LARGE, STEPS, "stuck-at", str(STUCK_AT))
            agent.wait_until(lambda: agent.alive.get(0, (0, 0))[0] >= STUCK_AT)
            agent.send_stop(0, GRACE_S)
            asked_s = time.monotonic()
            codes = agent.exit_codes()
            took_s = time.monotonic() - asked_s
            last = agent.said().strip().splitlines()[-1]
            steps = [one.step for one in listing.newest(agent.job_directory)]
    text = f"exit code {codes[0]} {took_s:.1f} s after it was asked, grace {GRACE_S:g} s; saved step {steps}; {last}"
    return steps == [STUCK_AT] and took_s < 3 * GRACE_S, text, {"seconds": took_s}
