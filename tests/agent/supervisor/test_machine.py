"""The state machine alone: no process is started, lists are compared."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from atoll.agent.supervisor.machine import MAX_REMEMBERED, Phase, State, Worker, handle
from atoll.agent.supervisor.processes.events import (
    CloseRequested,
    CodeReady,
    Ended,
    Event,
    ExitKind,
    FetchCode,
    ForgetRequested,
    HelloReceived,
    Instruction,
    LaunchRefused,
    LaunchRequested,
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
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_TRAINING, ViewReport, ViewTimes
from atoll.v1.worker_pb2 import Alive

A = WorkerKey("job-1", 1, 0)
B = WorkerKey("job-1", 2, 0)


def play(*events: Event, state: State | None = None) -> tuple[State, list[Instruction]]:
    """The state after these events, and the instructions of the last."""
    state, todo = state or State(), []
    for event in events:
        state, todo = handle(state, event)
    return state, todo


def sign(key: WorkerKey, step: int, plan: int, now_s: float, **reported: Any) -> SignOfLife:
    return SignOfLife(key, Alive(step=step, plan=plan, **reported), now_s)


def running(
    key: WorkerKey = A, *, hello: bool = True, stall_timeout_s: float = 60.0, now_s: float = 0.0
) -> list[Event]:
    begun: list[Event] = [LaunchRequested(key, stall_timeout_s), CodeReady(key), Started(key, 100 + key.run, now_s)]
    return [*begun, HelloReceived(key, now_s)] if hello else begun


def ended(key: WorkerKey = A, code: int = 0, words: str = "", oom: bool = False) -> Ended:
    return Ended(key, code, oom, words)


def worker(state: State, key: WorkerKey = A) -> Worker:
    return state.workers[key]


def reason(state: State, key: WorkerKey = A) -> str:
    exit = state.workers[key].exit
    return exit.reason if exit else ""


def kind(state: State, key: WorkerKey = A) -> ExitKind | None:
    exit = state.workers[key].exit
    return exit.kind if exit else None


def test_launch_fetches_then_starts() -> None:
    state, todo = play(LaunchRequested(A, 60))
    assert todo == [FetchCode(A), Report()]
    state, todo = play(CodeReady(A), state=state)
    assert todo == [StartProcess(A)]
    state, todo = play(Started(A, 7, 0.0), state=state)
    assert todo == [Report()]
    assert (worker(state).phase, worker(state).pid) == (Phase.RUNNING, 7)


def test_repeated_launch_does_nothing_in_any_phase() -> None:
    for events in (
        [LaunchRequested(A, 60)],
        running(),
        [*running(), ended()],
        [*running(), ended(), ForgetRequested(A)],
    ):
        state, todo = play(*events, LaunchRequested(A, 60))
        assert todo == []
        assert state == play(*events)[0]


def test_newer_run_waits_until_the_older_is_dead() -> None:
    state, todo = play(*running(A), LaunchRequested(B, 60))
    assert todo == [FetchCode(B), Report(), SendSignal(A, signal.SIGKILL), Report()]
    state, todo = play(CodeReady(B), state=state)
    assert todo == [], "run 1 is still alive"
    state, todo = play(ended(A, -9), state=state)
    assert todo == [Report(), StartProcess(B)]
    assert (kind(state, A), reason(state, A)) == (ExitKind.STOPPED, "run 2 of its job replaces it")


def test_newer_run_takes_the_place_of_one_that_was_being_fetched() -> None:
    state, todo = play(LaunchRequested(A, 60), LaunchRequested(B, 60))
    assert Release(A) in todo
    assert kind(state, A) is ExitKind.STOPPED
    assert play(CodeReady(A), state=state)[1] == [], "its code came too late"
    assert play(CodeReady(B), state=state)[1] == [StartProcess(B)]


def test_launch_of_an_older_run_is_ignored() -> None:
    assert play(*running(B), LaunchRequested(A, 60))[1] == []
    assert play(*running(B), ended(B), ForgetRequested(B), LaunchRequested(A, 60))[1] == [], (
        "also when all is forgotten"
    )
    other_job = WorkerKey("job-2", 1, 0)
    assert play(*running(B), LaunchRequested(other_job, 60))[1] == [FetchCode(other_job), Report()]


def test_stopped_run_does_not_start_again() -> None:
    assert play(StopRequested("job-1", 1, 5, "cancelled", 0.0), LaunchRequested(A, 60))[1] == []
    assert play(StopRequested("job-1", 1, 5, "cancelled", 0.0), LaunchRequested(B, 60))[1] == [FetchCode(B), Report()]


def test_stop_goes_by_word_then_sigterm_then_sigkill() -> None:
    state, todo = play(*running(), StopRequested("job-1", 1, 5.0, "to grow", 10.0))
    assert todo == [SendStop(A, 5.0, "to grow"), Report()]
    assert play(Ticked(14.9), state=state)[1] == []
    state, todo = play(Ticked(15.0), state=state)
    assert todo == [SendSignal(A, signal.SIGTERM)]
    assert play(Ticked(16.9), state=state)[1] == []
    state, todo = play(Ticked(17.0), state=state)
    assert todo == [SendSignal(A, signal.SIGKILL), Report()]
    assert play(Ticked(30.0), state=state)[1] == []
    state, _ = play(ended(A, -9), state=state)
    assert kind(state) is ExitKind.STOPPED


def test_script_that_never_said_hello_gets_sigterm_at_once() -> None:
    state, todo = play(*running(hello=False), StopRequested("job-1", 1, 5.0, "cancelled", 10.0))
    assert todo == [SendSignal(A, signal.SIGTERM), Report()]
    assert play(Ticked(16.9), state=state)[1] == [], "it has its grace to end by itself"
    assert play(Ticked(17.0), state=state)[1] == [SendSignal(A, signal.SIGKILL), Report()]


def test_repeated_stop_hurries_but_never_delays() -> None:
    state, _ = play(*running(), StopRequested("job-1", 1, 30.0, "to grow", 0.0))
    later, todo = play(StopRequested("job-1", 1, 30.0, "to grow", 20.0), state=state)
    assert todo == []
    assert play(Ticked(30.0), state=later)[1] == [SendSignal(A, signal.SIGTERM)]
    sooner, _ = play(StopRequested("job-1", 1, 1.0, "cancelled", 2.0), state=state)
    assert play(Ticked(3.0), state=sooner)[1] == [SendSignal(A, signal.SIGTERM)]


def test_stop_is_for_this_run_and_older_ones_of_the_job() -> None:
    newer, other = WorkerKey("job-1", 3, 0), WorkerKey("job-2", 1, 0)
    state, _ = play(*running(newer), *running(other))
    assert play(StopRequested("job-1", 2, 5, "old", 0.0), state=state)[1] == []


def test_ends_are_told_apart() -> None:
    for code, words, wanted in (
        (0, "", (ExitKind.FINISHED, "")),
        (85, "", (ExitKind.DRAINED, "stopped at a step boundary, as requested")),
        (75, "atoll: rank 2 is gone", (ExitKind.PEER_LOST, "atoll: rank 2 is gone")),
        (1, "ValueError: x", (ExitKind.FAILED, "ValueError: x")),
        (1, "package.errors.Bad: x", (ExitKind.FAILED, "package.errors.Bad: x")),
        (3, "", (ExitKind.FAILED, "exit code 3, without a word")),
        (3, "hello", (ExitKind.FAILED, "exit code 3, its last line: hello")),
        (-9, "noise", (ExitKind.SIGNALLED, "killed by signal 9 (SIGKILL)")),
        (-11, "noise", (ExitKind.SIGNALLED, "killed by signal 11 (SIGSEGV)")),
        (-40, "", (ExitKind.SIGNALLED, "killed by signal 40")),
    ):
        state, todo = play(*running(), ended(A, code, words))
        assert todo == [Report()]
        assert (kind(state), reason(state)) == wanted


def test_out_of_memory_is_named() -> None:
    state, _ = play(*running(), ended(A, -9, oom=True))
    assert kind(state) is ExitKind.SIGNALLED
    assert "out of memory" in reason(state)


def test_worker_that_obeys_the_word_keeps_its_own_end() -> None:
    asked = (*running(), StopRequested("job-1", 1, 5.0, "to grow", 0.0))
    assert kind(play(*asked, ended(A, 85))[0]) is ExitKind.DRAINED
    assert kind(play(*asked, ended(A, 1, "ValueError: x"))[0]) is ExitKind.FAILED
    assert kind(play(*asked, Ticked(5.0), ended(A, 1))[0]) is ExitKind.STOPPED


def test_worker_stopped_by_a_signal_is_dead_after_a_while() -> None:
    begun = running(hello=False)
    state, todo = play(*begun, Ticked(0.0, frozenset({A})), Ticked(1.0, frozenset({A})))
    assert todo == []
    assert play(Ticked(1.3), Ticked(2.0, frozenset({A})), state=state)[1] == [], "it went on in between"
    state, todo = play(Ticked(1.6, frozenset({A})), state=state)
    assert todo == [SendSignal(A, signal.SIGKILL), Report()]
    state, _ = play(ended(A, -9), state=state)
    assert kind(state) is ExitKind.UNRESPONSIVE
    assert "SIGSTOP" in reason(state)


def test_silence_counts_only_after_hello() -> None:
    ticks = [Ticked(float(s)) for s in range(1, 13)]
    assert play(*running(hello=False, stall_timeout_s=10), *ticks)[1] == []
    state, todo = play(*running(stall_timeout_s=10), *ticks[:10])
    assert todo == []
    state, todo = play(Ticked(11.0), state=state)
    assert todo == [SendSignal(A, signal.SIGKILL), Report()]
    assert "stall_timeout_s = 10" in reason(play(ended(A, -9), state=state)[0])


def test_signs_of_life_keep_a_worker_and_tell_its_step() -> None:
    events: list[Event] = []
    for s in range(1, 40):
        events += [Ticked(float(s)), sign(A, 10 * s, 2, float(s))]
    state, _ = play(*running(stall_timeout_s=3), *events)
    assert worker(state).phase is Phase.RUNNING
    assert (worker(state).step, worker(state).plan) == (390, 2)


def test_agent_that_was_stopped_itself_blames_nobody() -> None:
    state, todo = play(*running(stall_timeout_s=5), Ticked(1.0), Ticked(100.0, frozenset({A})))
    assert todo == []
    assert play(Ticked(101.0, frozenset({A})), state=state)[1] == []


def test_start_that_fails_is_an_exit_and_lets_nothing_wait() -> None:
    state, todo = play(LaunchRequested(A, 60), StartFailed(A, "no such script"))
    assert todo == [Release(A), Report()]
    assert (kind(state), reason(state)) == (ExitKind.NOT_STARTED, "no such script")
    state, todo = play(LaunchRefused(B, "device = 9"))
    assert todo == [Report()]
    assert kind(state, B) is ExitKind.NOT_STARTED


def test_exit_is_kept_until_it_is_forgotten_and_the_living_are_not_forgotten() -> None:
    state, todo = play(*running(), ForgetRequested(A))
    assert todo == []
    assert A in state.workers
    state, todo = play(ended(), ForgetRequested(A), state=state)
    assert todo == [Release(A)]
    assert A not in state.workers


def test_memory_is_bounded_over_any_number_of_jobs() -> None:
    state = State()
    for number in range(MAX_REMEMBERED + 50):
        key = WorkerKey(f"job-{number}", 1, 0)
        state, _ = play(LaunchRequested(key, 60), StartFailed(key, "no"), state=state)
        last = WorkerKey("last", number + 1, 0)
        state, _ = play(*running(last), ended(last), state=state)
    state, todo = play(LaunchRequested(A, 60), state=state)
    assert len(state.workers) <= MAX_REMEMBERED + 1
    assert WorkerKey("last", MAX_REMEMBERED + 50, 0) in state.workers
    assert len(state.fences) <= 2 * MAX_REMEMBERED
    assert any(isinstance(instruction, Release) for instruction in todo)


def test_closing_stops_all_and_starts_none() -> None:
    waiting = WorkerKey("job-2", 1, 0)
    state, todo = play(*running(), LaunchRequested(waiting, 60), CloseRequested(3.0, "its agent ends", 0.0))
    assert SendStop(A, 3.0, "its agent ends") in todo
    assert Release(waiting) in todo
    assert play(LaunchRequested(WorkerKey("job-3", 1, 0), 60), state=state)[1] == []
    assert play(CodeReady(waiting), state=state)[1] == []


def test_script_that_exits_well_on_sigterm_has_not_finished() -> None:
    """1. A plain script catches SIGTERM, cleans up and exits with 0. 2. Its agent is shut down for an upgrade. 3. That
    is a stop, not the end of the training: the job would count as done."""
    state, _ = play(*running(hello=False), CloseRequested(3.0, "its agent was asked to end", 0.0), ended(A, 0))
    assert (kind(state), reason(state)) == (ExitKind.STOPPED, "its agent was asked to end")


@pytest.mark.parametrize(("path", "hints"), [("config.json", True), ("data/words.txt", True), ("/data/words", False)])
def test_a_file_that_did_not_travel_is_told_with_the_option_that_takes_it_along(path: str, hints: bool) -> None:
    words = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
    told = classify(Ended(A, 1, False, words), None).reason
    assert told.startswith(words)
    assert ("--workdir FOLDER" in told) == hints


def test_who_is_killed_at_the_end_of_its_grace_is_told_with_the_setting() -> None:
    """A plain script that saves on SIGTERM was killed after 4 s, and nothing said what would give it longer."""
    state, _ = play(*running(hello=False), StopRequested("job-1", 1, 28.0, "cancelled", 0.0))
    assert play(Ticked(29.0), state=state)[1] == []
    state, _ = play(Ticked(30.0), ended(A, -9), state=state)
    assert (
        reason(state) == "cancelled (killed: it did not stop on SIGTERM; stop_grace_s in the job file gives it longer)"
    )


def test_who_saves_is_left_to_it_as_long_as_bytes_move() -> None:
    """1. A worker that was asked to stop writes its checkpoint for 25 s; it once got its grace and 2 s, and what it had
    written was lost. 2. The disk hangs: no byte for 10 s is the end of it. 3. Bytes that move for ever are too, after
    ten minutes; a worker that only says that it lives gets its grace alone."""

    def until_signalled(moving_s: int, *, saving: bool = True) -> int:
        """The second in which SIGTERM is sent to a worker whose bytes move until `moving_s`."""
        state, _ = play(*running(), StopRequested("job-1", 1, 3.0, "cancelled", 0.0))
        for second in range(1, 1000):
            report = sign(A, 10, 1, float(second), saving=saving, saved_bytes=min(second, moving_s) * saving)
            state, todo = play(report, Ticked(float(second)), state=state)
            if SendSignal(A, signal.SIGTERM) in todo:
                return second
        raise AssertionError("it was never stopped")

    assert until_signalled(25) == 36
    assert until_signalled(10_000) == 603
    assert until_signalled(25, saving=False) == 3


def test_one_worker_is_stopped_and_the_run_goes_on_with_the_others() -> None:
    """1. A run goes on without rank 1: the node is asked to stop that rank. 2. Its other worker is left alone. 3. No
    fence is raised: a worker of the same run that joins later starts."""
    lost, stays, joins = WorkerKey("job-1", 1, 1), A, WorkerKey("job-1", 1, 3)
    state, todo = play(*running(lost), *running(stays), StopRequested("job-1", 1, 0.0, "lost", 0.0, frozenset({1, 7})))
    assert todo == [SendStop(lost, 0.0, "lost"), Report()]
    assert worker(state, stays).phase is Phase.RUNNING
    assert play(LaunchRequested(joins, 60), state=state)[1] == [FetchCode(joins), Report()]


def test_the_controller_hears_at_once_of_another_view_or_stage_and_not_of_each_step() -> None:
    said = ViewReport(view=1, stage=VIEW_STAGE_TRAINING, step=3)
    state, todo = play(*running(), sign(A, 3, 1, 1.0, view=said))
    assert (todo, worker(state).view) == ([Report()], said)
    state, todo = play(sign(A, 4, 1, 1.5, view=ViewReport(view=1, stage=VIEW_STAGE_TRAINING, step=4)), state=state)
    assert (todo, worker(state).view and worker(state).view.step) == ([], 4)
    broken = ViewReport(view=1, stage=VIEW_STAGE_BROKEN, step=4, reason="rank 1 went away")
    assert play(sign(A, 4, 1, 1.6, view=broken), state=state)[1] == [Report()]
    stepped = ViewReport(view=1, stage=VIEW_STAGE_TRAINING, step=5, times=ViewTimes(first_step_s=0.4))
    assert play(sign(A, 5, 1, 1.6, view=stepped), state=state)[1] == [Report()], "its first step there"
