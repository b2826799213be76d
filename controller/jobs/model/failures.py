"""Judges a run's end from the exits of its workers: which one is the cause, and whether to try again. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.controller.jobs.model.device_memory import UNKNOWN, name_of
from atoll.controller.jobs.model.observed import START_DEADLINE_S
from atoll.controller.state.records import (
    Cause,
    ExitRecord,
    JobPhase,
    JobRecord,
    RunFailure,
    RunMember,
    RunRecord,
    WorkerExitKind,
)

# A process that ends by one of these did it to itself (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV): the script crashed.
CRASH_SIGNALS: Final = frozenset({4, 6, 7, 8, 11})
# What a plain torchrun script says when another rank went away under it.
PEER_SYMPTOMS: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
NOT_STARTED_TRIES: Final = 3
BACKOFF_S: Final = (1.0, 2.0, 4.0)
STUCK_BACKOFF_S: Final = (2.0, 4.0, 8.0, 16.0, 32.0)
LOSS_TRIES: Final = 8
"""Losses in a row at the same step, without one made in between, that end a job: what needs more memory than there is
needs it again. With the backoff these take more than two minutes."""
LATE_DOUBLINGS: Final = 3
# What a script dies of before it has done anything, on every machine alike: its code does not load.
LOAD_ERRORS: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
# What Atoll raises where a script asks for something that it cannot do.
REFUSALS: Final = ("atoll.errors.BadInput", "atoll.errors.SettingError")
GOOD_RUN_S: Final = 600.0
"""A run that trains for this long has left its job's failures behind: `max_restarts` counts failures in a row, so that
one a day does not end a job of weeks. What fails sooner than this again and again uses its restarts up."""
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """The decision on a job after a run. counts: the script caused the run's end."""

    after: JobPhase
    reason: str
    code: int = 0
    retry_delay_s: float = 0.0
    counts: bool = False
    failure: RunFailure | None = None


def crashed(exit: ExitRecord) -> bool:
    """Return True if a signal from inside ended the process."""
    return exit.kind is WorkerExitKind.SIGNALLED and -exit.code in CRASH_SIGNALS


def _blame(exit: ExitRecord) -> int:
    """Order of a run's exits as causes, 0 first. A lost machine makes the scripts of others fail, never the other way
    round; so what came from outside is blamed before what a script did, and what merely followed comes last."""
    if exit.kind in (WorkerExitKind.LOST, WorkerExitKind.UNRESPONSIVE) or (
        exit.kind is WorkerExitKind.SIGNALLED and not crashed(exit)
    ):
        return 0
    symptom = any(words in exit.reason for words in PEER_SYMPTOMS)
    if exit.kind is WorkerExitKind.FAILED or crashed(exit):
        return 3 if symptom or (crashed(exit) and -exit.code == 6) else 1  # NCCL's watchdog aborts when a peer is lost
    return {WorkerExitKind.NOT_STARTED: 2, WorkerExitKind.DRAINED: 4, WorkerExitKind.PEER_LOST: 5}.get(exit.kind, 6)


def root_cause(members: Sequence[RunMember]) -> tuple[RunMember, ExitRecord] | None:
    """The member whose end ended the run: by blame, then by who ended first, then by rank. None: all finished."""
    ended = [(m, m.exit) for m in members if m.exit is not None and m.exit.kind is not WorkerExitKind.FINISHED]
    return min(ended, key=lambda pair: (_blame(pair[1]), pair[1].order, pair[0].rank), default=None)


def judge(job: JobRecord, run: RunRecord) -> RunJudgement:
    """Decide what becomes of `job` once no process of `run` is left. Every member of `run` has its exit."""
    if job.cancel:
        return RunJudgement(JobPhase.CANCELLED, "cancelled")
    found = root_cause(run.members)
    if found is None and run.cause is not Cause.LEFT_EARLY:
        return RunJudgement(JobPhase.DONE, finished_text(len(run.members)))
    if run.cause is Cause.LEFT_EARLY or found is None:
        step = max((m.exit.step for m in run.members if m.exit), default=0)
        return _script_failure(job, run.why, ExitRecord(kind=WorkerExitKind.FINISHED, reason="left early", step=step))
    member, exit = found
    where = f"rank {member.rank} on {member.node}"
    if exit.overflow_batch and (overflow := _out_of_memory(job, member, exit)):
        return overflow
    if exit.kind is WorkerExitKind.FAILED or crashed(exit):
        return _script_failure(job, f"{where} failed: {exit.reason or f'exit code {exit.code}'}", exit)
    if exit.kind is WorkerExitKind.NOT_STARTED:
        return _not_started(job, f"{where} could not start: {exit.reason}", exit)
    if exit.kind in (
        WorkerExitKind.LOST,
        WorkerExitKind.SIGNALLED,
        WorkerExitKind.UNRESPONSIVE,
        WorkerExitKind.PEER_LOST,
    ):
        finished = [m.rank for m in run.members if m.exit and m.exit.kind is WorkerExitKind.FINISHED]
        if exit.kind is WorkerExitKind.PEER_LOST and run.cause in (Cause.GROW, Cause.SHRINK):
            return RunJudgement(JobPhase.QUEUED, run.why)  # it left its step, or what its script does after training
        if exit.kind is WorkerExitKind.PEER_LOST and finished:
            return _script_failure(job, left_early_text(finished), replace(exit, code=0, reason="left early"))
        reached = run.recovery.reached_step if run.recovery else 0  # a machine that is lost does not tell its step
        last = replace(exit, step=max(exit.step, reached))
        how = "lost a peer" if exit.kind is WorkerExitKind.PEER_LOST else "was lost"
        return _outside(job, f"{where} {how}: {exit.reason or exit.kind}", last)
    if (
        exit.kind is WorkerExitKind.DRAINED and run.cause is Cause.LOSS
    ):  # its agent was shut down, or it exits with 85 always
        return _outside(job, run.why or f"{where} stopped", exit)
    if run.cause is Cause.LATE:
        return _outside(job, run.why, replace(exit, kind=WorkerExitKind.STOPPED, reason=run.why))
    return RunJudgement(JobPhase.QUEUED, run.why or f"{where} stopped")


def _out_of_memory(job: JobRecord, member: RunMember, exit: ExitRecord) -> RunJudgement | None:
    """Judge a worker whose memory did not suffice. Return None where its plan kept to no smaller batch than before."""
    known = job.learned.memory.get(name_of(member), UNKNOWN)
    said = f"rank {member.rank} on {member.node} ran out of memory with {exit.overflow_batch} samples ({exit.reason})"
    if exit.overflow_batch == 1:
        text = (
            f"{said}: {name_of(member)} does not hold a single one. Use a device with more memory, a smaller model or "
            "sample, or cut the model into stages (run.prepare_pipeline)"
        )
        return RunJudgement(JobPhase.FAILED, text, abs(exit.code) or 1, counts=True)
    if known.repeated:
        return None
    return RunJudgement(JobPhase.QUEUED, f"{said}; the next run gives it at most {known.max_batch}")


def has_recovered(job: JobRecord, trained_s: float, newest_step: int) -> bool:
    """Return True if the job's restarts and losses count anew.

    trained_s: since all workers of its run live. newest_step: 0 for a script that reports none. Training below the
    step that failed proves nothing."""
    last = job.status.last_failure
    if trained_s < GOOD_RUN_S or not (job.status.restarts or (last is not None and last.times > 1)):
        return False
    return not newest_step or last is None or newest_step > last.step


def start_deadline_s(job: JobRecord) -> float:
    """Return the deadline, in seconds, until all workers of a run live. It doubles after each late start in a row:
    sending code to many machines is the slow part."""
    last = job.status.last_failure
    late = last.times if last is not None and last.kind is WorkerExitKind.STOPPED else 0
    return job.spec.environment_s + START_DEADLINE_S * 2.0 ** min(late, LATE_DOUBLINGS)


def finished_text(ranks: int) -> str:
    """Return the reason for a run whose ranks all finished."""
    return f"all {ranks} ranks finished" if ranks > 1 else "its worker finished"


def left_early_text(ranks: Sequence[int]) -> str:
    """Return the reason for ranks that finished while others were still training."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{who} left early with exit code 0 while others were training; every rank must run the same steps"


def _script_failure(job: JobRecord, reason: str, exit: ExitRecord) -> RunJudgement:
    failure, exit_code = _compared(job, exit), exit.code or 1
    raised = exit.reason.partition(":")[0] if exit.kind is WorkerExitKind.FAILED else ""
    if raised in LOAD_ERRORS or (raised in REFUSALS and not exit.step):
        why = "the code does not load" if raised in LOAD_ERRORS else "Atoll refused it before the first step"
        text = f"{reason}; {why}, so another try would not help"
        return RunJudgement(JobPhase.FAILED, text, exit_code, counts=True, failure=failure)
    if failure.times > 1:
        text = f"{reason}; the run before failed the same way at step {exit.step}, so a third try would not help"
        return RunJudgement(JobPhase.FAILED, text, exit_code, counts=True, failure=failure)
    if job.status.restarts >= job.spec.max_restarts:
        used = {0: "", 1: "; its restart is used up"}.get(
            job.spec.max_restarts, f"; all {job.spec.max_restarts} restarts are used up"
        )
        return RunJudgement(JobPhase.FAILED, reason + used, exit_code, counts=True, failure=failure)
    delay_s = BACKOFF_S[min(job.status.restarts, len(BACKOFF_S) - 1)]
    text = f"{reason}; restart {job.status.restarts + 1} of {job.spec.max_restarts} in {delay_s:.0f} s"
    return RunJudgement(JobPhase.QUEUED, text, exit_code, delay_s, counts=True, failure=failure)


def _not_started(job: JobRecord, reason: str, exit: ExitRecord) -> RunJudgement:
    """Judge a worker that could not start: retry a few times, since what a node lacks rarely appears."""
    failure = _compared(job, exit)
    if job.spec.script in exit.reason or failure.times >= NOT_STARTED_TRIES:
        return RunJudgement(JobPhase.FAILED, reason, exit.code or 1, failure=failure)
    delay_s = BACKOFF_S[min(failure.times, len(BACKOFF_S)) - 1]
    return RunJudgement(JobPhase.QUEUED, f"{reason}; trying again in {delay_s:.0f} s", 0, delay_s, failure=failure)


def _outside(job: JobRecord, reason: str, exit: ExitRecord) -> RunJudgement:
    """Judge a loss from outside: retry with growing delay while no step is completed, up to LOSS_TRIES times."""
    last = job.status.last_failure
    times = last.times + 1 if last is not None and last.step == exit.step else 1
    failure = RunFailure(kind=exit.kind, step=exit.step, code=exit.code, reason=exit.reason, times=times)
    if times >= LOSS_TRIES:
        text = f"{reason}; {times} times in a row at step {exit.step}, so another try would not help"
        return RunJudgement(JobPhase.FAILED, text, exit.code or 1, failure=failure)
    delay_s = STUCK_BACKOFF_S[min(times - 2, len(STUCK_BACKOFF_S) - 1)] if times > 1 else 0.0
    return RunJudgement(JobPhase.QUEUED, reason, 0, delay_s, failure=failure)


def _compared(job: JobRecord, exit: ExitRecord) -> RunFailure:
    """The failure, counted with those before it that were the same: numbers in its reason (addresses, process and run
    numbers) do not make it another one, nor does the rank that was first to meet it."""
    last, failure = (
        job.status.last_failure,
        RunFailure(kind=exit.kind, step=exit.step, code=exit.code, reason=exit.reason),
    )
    if last is None or (last.kind, last.step, last.code) != (failure.kind, failure.step, failure.code):
        return failure
    same = _NUMBER.sub("#", last.reason) == _NUMBER.sub("#", failure.reason)
    return replace(failure, times=last.times + 1) if same else failure
