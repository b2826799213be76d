"""State machine of the workers: events in, the next state and instructions out. Touches no process or clock.

A worker's life: FETCHING (its code) -> WAITING (for older workers of its job to end) -> STARTING -> RUNNING -> STOPPING
-> EXITED. EXITED is kept until the controller sends Forget. Any state may lead to EXITED."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from atoll.agent.supervisor.processes.events import (
    CloseRequested,
    CodeReady,
    Ended,
    Event,
    Exit,
    ExitKind,
    FetchCode,
    ForgetRequested,
    HelloReceived,
    Instruction,
    LaunchRefused,
    LaunchRequested,
    Notify,
    Release,
    Report,
    SendSignal,
    SendStop,
    SignOfLife,
    Started,
    StartFailed,
    StartProcess,
    StopRequested,
    Ticked,
)
from atoll.agent.supervisor.processes.exits import classify
from atoll.agent.supervisor.progress import Life, Progress
from atoll.errors import exit_codes
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import ViewReport

SIGTERM_TO_SIGKILL_S: Final = 2.0
"""Seconds from SIGTERM to SIGKILL."""
HANG_GRACE_S: Final = 10.0
"""Grace of a hung worker, in seconds: its link's thread saves the state of the last step boundary."""
SAVING_S: Final = 600.0
"""Longest extension of the grace for a worker that is saving, in seconds."""
MAX_REMEMBERED: Final = 256
"""Exits, fences of jobs and forgotten workers that are kept, newest first."""
AGENT_PAUSE_S: Final = 1.5
"""Gap between two ticks, in seconds, that shows the agent itself was stopped. Silence of workers then does not count.
"""


class Phase(Enum):
    FETCHING = "fetching"
    WAITING = "waiting"
    STARTING = "starting"  # only until the answer to StartProcess, which is the next event
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class Stop:
    """Progress of a stop. `signal` is the last one sent, 0 before the first."""

    reason: str
    kind: ExitKind
    signal: int
    next_at_s: float
    """Time of the next stage: SIGTERM, then SIGKILL. A worker that saves gets up to SAVING_S longer."""


@dataclass(frozen=True, slots=True)
class Worker:
    key: WorkerKey
    phase: Phase
    pid: int = 0
    stop: Stop | None = None
    exit: Exit | None = None
    life: Life = field(default_factory=Life)
    progress: Progress = field(default_factory=Progress)
    step: int = 0
    plan: int = 0
    local_batch: int = 0
    trained: bool = False
    view: ViewReport | None = None
    volunteer_port: int = 0

    @property
    def greeted(self) -> bool:
        return self.life.heard_at_s is not None


@dataclass(frozen=True, slots=True)
class State:
    workers: Mapping[WorkerKey, Worker] = field(default_factory=lambda: MappingProxyType({}))
    fences: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Oldest run of each job that may still start a worker."""
    forgotten: tuple[WorkerKey, ...] = ()
    closing: bool = False
    ticked_at_s: float | None = None


def handle(state: State, event: Event) -> tuple[State, list[Instruction]]:
    """Return the next state and the instructions to carry out, in this order."""
    match event:
        case LaunchRequested():
            return _launch(state, event)
        case LaunchRefused(key, reason):
            if not _is_new(state, key):
                return state, []
            state, surplus = _bounded(state)
            return _put(state, _not_started(Worker(key, Phase.FETCHING), reason)), [*surplus, Report()]
        case StopRequested():
            return _stop(state, event)
        case CloseRequested(grace_s, reason, now_s):
            return _stop_workers(replace(state, closing=True), list(state.workers), grace_s, reason, now_s)
        case ForgetRequested(key):
            return _forget(state, key)
        case Ticked():
            return _tick(state, event)
        case _:
            worker = state.workers.get(event.key)
            if worker is None or worker.phase is Phase.EXITED:
                return state, []  # a late message of a worker whose exit is known
            return _of_worker(state, worker, event)


def _of_worker(
    state: State, worker: Worker, event: CodeReady | StartFailed | Started | HelloReceived | SignOfLife | Ended
) -> tuple[State, list[Instruction]]:
    match event:
        case CodeReady() if worker.phase is Phase.FETCHING:
            return _start_waiting(_put(state, replace(worker, phase=Phase.WAITING)))
        case StartFailed(_, reason):
            return _start_waiting(_put(state, _not_started(worker, reason)), [Release(worker.key), Report()])
        case Started(_, pid, _):
            return _put(state, replace(worker, phase=Phase.RUNNING, pid=pid)), [Report()]
        case HelloReceived(_, now_s):
            todo: list[Instruction] = [] if worker.greeted else [Report()]
            life, progress = worker.life.heard(now_s), worker.progress.greeted(now_s)
            return _put(state, replace(worker, life=life, progress=progress)), todo
        case SignOfLife(_, alive, now_s):
            progress = worker.progress.at(alive.step, now_s, waits=alive.waits)
            progress = progress.saved(alive.saving, alive.saved_bytes + alive.view.handed_bytes, now_s)
            after = replace(
                worker,
                life=worker.life.heard(now_s),
                progress=progress,
                step=alive.step,
                plan=alive.plan,
                local_batch=alive.local_batch,
                trained=alive.trained,
                view=alive.view if alive.HasField("view") else None,
                volunteer_port=alive.volunteer_port,
            )
            return _put(state, after), [] if _urgent_part(after) == _urgent_part(worker) else [Report()]
        case Ended():
            after = replace(worker, phase=Phase.EXITED, exit=classify(event, _killed(worker.stop, event.exit_code)))
            return _start_waiting(_put(state, after), [Report()])
    return state, []


def _urgent_part(worker: Worker) -> tuple[object, ...]:
    """Return the part of a worker's report that the controller needs at once."""
    view = worker.view
    stage = None if view is None else (view.view, view.stage, view.times.first_step_s > 0)
    return worker.trained, worker.volunteer_port, stage


def _launch(state: State, event: LaunchRequested) -> tuple[State, list[Instruction]]:
    key = event.key
    if not _is_new(state, key):
        return state, []
    life, progress = Life(event.stall_timeout_s), Progress(event.hang_s)
    worker = Worker(key, Phase.FETCHING, life=life, progress=progress)
    state, todo = _bounded(state)
    state = _fence(_put(state, worker), key.job, key.run)
    todo += [FetchCode(key), Report()]
    for older in [w for w in state.workers.values() if w.key.job == key.job and w.key.run < key.run]:
        state, more = _kill(state, older, ExitKind.STOPPED, f"run {key.run} of its job replaces it")
        todo += more
    return state, todo


def _is_new(state: State, key: WorkerKey) -> bool:
    known = key in state.workers or key in state.forgotten
    return not known and not state.closing and key.run >= state.fences.get(key.job, 0)


def _stop(state: State, event: StopRequested) -> tuple[State, list[Instruction]]:
    if event.ranks:
        keys = [WorkerKey(event.job, event.run, rank) for rank in sorted(event.ranks)]
        keys = [key for key in keys if key in state.workers]
    else:
        keys = [key for key in state.workers if key.job == event.job and key.run <= event.run]
        state = _fence(state, event.job, event.run + 1)
    return _stop_workers(state, keys, event.grace_s, event.reason, event.now_s)


def _stop_workers(
    state: State, keys: list[WorkerKey], grace_s: float, reason: str, now_s: float
) -> tuple[State, list[Instruction]]:
    todo: list[Instruction] = []
    for key in keys:
        worker = state.workers[key]
        match worker.phase:
            case Phase.FETCHING | Phase.WAITING:
                exit = Exit(ExitKind.STOPPED, 0, f"stopped before it began: {reason}")
                state = _put(state, replace(worker, phase=Phase.EXITED, exit=exit))
                todo += [Release(key), Report()]
            case Phase.RUNNING if worker.greeted:
                stop = Stop(reason, ExitKind.STOPPED, 0, now_s + grace_s)
                state = _put(state, replace(worker, phase=Phase.STOPPING, stop=stop))
                todo += [SendStop(key, grace_s, reason), Report()]
            case Phase.RUNNING:  # it cannot receive a Stop: a plain script, or one that still imports
                stop = Stop(reason, ExitKind.STOPPED, signal.SIGTERM, now_s + grace_s + SIGTERM_TO_SIGKILL_S)
                state = _put(state, replace(worker, phase=Phase.STOPPING, stop=stop))
                todo += [SendSignal(key, signal.SIGTERM), Report()]
            case Phase.STOPPING if worker.stop is not None:  # repeated, or more urgent; never later than before
                spare_s = SIGTERM_TO_SIGKILL_S if worker.stop.signal else 0.0
                sooner = min(worker.stop.next_at_s, now_s + grace_s + spare_s)
                state = _put(state, replace(worker, stop=replace(worker.stop, next_at_s=sooner)))
    return state, todo


def _tick(state: State, event: Ticked) -> tuple[State, list[Instruction]]:
    paused_s = 0.0 if state.ticked_at_s is None else event.now_s - state.ticked_at_s
    state = replace(state, ticked_at_s=event.now_s)
    todo: list[Instruction] = []
    for worker in list(state.workers.values()):
        if worker.phase not in (Phase.RUNNING, Phase.STOPPING):
            continue
        unseen_s = paused_s if paused_s > AGENT_PAUSE_S else 0.0
        life = worker.life.seen(event.now_s, worker.key in event.stopped, unseen_s)
        looked_at = replace(worker, life=life, progress=worker.progress.paused(unseen_s))
        state = _put(state, looked_at)
        obeying = worker.stop is None or not worker.stop.signal
        if obeying and (reason := life.verdict(event.now_s)):
            state, more = _kill(state, looked_at, ExitKind.UNRESPONSIVE, reason)
        elif worker.stop is not None:
            state, more = _next_stage(state, looked_at, worker.stop, event.now_s)
        else:
            state, more = _look_at_progress(state, looked_at, event.now_s)
        todo += more
    return state, todo


def _look_at_progress(state: State, worker: Worker, now_s: float) -> tuple[State, list[Instruction]]:
    if reason := worker.progress.hung(now_s, trained=worker.trained):
        stop = Stop(reason, ExitKind.FAILED, 0, now_s + HANG_GRACE_S)
        state = _put(state, replace(worker, phase=Phase.STOPPING, stop=stop))
        return state, [SendStop(worker.key, HANG_GRACE_S, reason), Report()]
    stall_warning = worker.progress.stall_warning(now_s)
    if stall_warning is None:
        return state, []
    state = _put(state, replace(worker, progress=replace(worker.progress, notified=True)))
    # One event is enough for all ranks that wait; a rank that does not wait is the one that they wait for.
    return state, [Notify(worker.key, stall_warning)] if worker.key.rank == 0 or not worker.progress.waits else []


def _killed(stop: Stop | None, exit_code: int) -> tuple[ExitKind, str] | None:
    """Return kind and reason of a worker's end if the agent caused it."""
    if stop is None:
        return None
    came_to_itself = exit_code in (exit_codes.FINISHED, exit_codes.DRAINED)
    hung = stop.kind is ExitKind.FAILED and not came_to_itself
    return (stop.kind, stop.reason) if stop.signal or hung else None


def _next_stage(state: State, worker: Worker, stop: Stop, now_s: float) -> tuple[State, list[Instruction]]:
    if now_s < stop.next_at_s or stop.signal == signal.SIGKILL:
        return state, []
    if not stop.signal and worker.progress.saves(now_s) and now_s < stop.next_at_s + SAVING_S:
        return state, []
    if stop.signal == signal.SIGTERM:
        longer = "; stop_grace_s in the job file gives it longer" if stop.kind is ExitKind.STOPPED else ""
        return _kill(state, worker, stop.kind, f"{stop.reason} (killed: it did not stop on SIGTERM{longer})")
    stop = replace(stop, signal=signal.SIGTERM, next_at_s=now_s + SIGTERM_TO_SIGKILL_S)
    return _put(state, replace(worker, stop=stop)), [SendSignal(worker.key, signal.SIGTERM)]


def _kill(state: State, worker: Worker, kind: ExitKind, reason: str) -> tuple[State, list[Instruction]]:
    match worker.phase:
        case Phase.EXITED:
            return state, []
        case Phase.FETCHING | Phase.WAITING:
            after = replace(worker, phase=Phase.EXITED, exit=Exit(kind, 0, reason))
            return _put(state, after), [Release(worker.key), Report()]
        case _:
            stop = Stop(reason, kind, signal.SIGKILL, float("inf"))
            after = replace(worker, phase=Phase.STOPPING, stop=stop)
            return _put(state, after), [SendSignal(worker.key, signal.SIGKILL), Report()]


def _start_waiting(state: State, todo: list[Instruction] | None = None) -> tuple[State, list[Instruction]]:
    """Start each worker that has its code and whose job has no older worker left."""
    todo = todo or []
    living = [w.key for w in state.workers.values() if w.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)]
    for key, worker in list(state.workers.items()):
        if worker.phase is Phase.WAITING and not any(k.job == key.job and k.run < key.run for k in living):
            state = _put(state, replace(worker, phase=Phase.STARTING))
            todo.append(StartProcess(key))
    return state, todo


def _forget(state: State, key: WorkerKey) -> tuple[State, list[Instruction]]:
    worker = state.workers.get(key)
    if worker is None or worker.phase is not Phase.EXITED:
        return state, []  # unknown, or alive: its exit must be reported first
    workers = {k: w for k, w in state.workers.items() if k != key}
    forgotten = (*state.forgotten, key)[-MAX_REMEMBERED:]
    return replace(state, workers=MappingProxyType(workers), forgotten=forgotten), [Release(key)]


def _not_started(worker: Worker, reason: str) -> Worker:
    return replace(worker, phase=Phase.EXITED, exit=Exit(ExitKind.NOT_STARTED, 0, reason))


def _put(state: State, worker: Worker) -> State:
    return replace(state, workers=MappingProxyType({**state.workers, worker.key: worker}))


def _bounded(state: State) -> tuple[State, list[Instruction]]:
    """Forget the oldest exits beyond MAX_REMEMBERED."""
    exited = [key for key, worker in state.workers.items() if worker.phase is Phase.EXITED]
    todo: list[Instruction] = []
    for key in exited[: max(0, len(exited) - MAX_REMEMBERED)]:
        state, more = _forget(state, key)
        todo += more
    return state, todo


def _fence(state: State, job: str, run: int) -> State:
    """Start no more workers of `job` older than `run`. Kept for jobs with workers, and for the newest others."""
    fences = {j: r for j, r in state.fences.items() if j != job}
    fences[job] = max(run, state.fences.get(job, 0))
    present = {key.job for key in state.workers}
    for old in [j for j in fences if j not in present and j != job][: max(0, len(fences) - MAX_REMEMBERED)]:
        del fences[old]
    return replace(state, fences=MappingProxyType(fences))
