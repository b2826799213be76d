"""A script that hangs while its process lives: the state machine alone."""

from __future__ import annotations

import signal
from typing import Any

from atoll.agent.supervisor.machine import HANG_GRACE_S, Phase, State, handle
from atoll.agent.supervisor.processes.events import (
    CodeReady,
    Ended,
    Event,
    ExitKind,
    HelloReceived,
    Instruction,
    LaunchRequested,
    Notify,
    SendSignal,
    SendStop,
    SignOfLife,
    Started,
    Ticked,
)
from atoll.jobs.worker_key import WorkerKey
from atoll.v1.common_pb2 import ViewReport
from atoll.v1.worker_pb2 import Alive

A = WorkerKey("job-1", 1, 0)


def play(state: State, *events: Event) -> tuple[State, list[Instruction]]:
    """The state after these events, and all instructions."""
    todo: list[Instruction] = []
    for event in events:
        state, more = handle(state, event)
        todo += more
    return state, todo


def sign(key: WorkerKey, step: int, plan: int, now_s: float, **reported: Any) -> SignOfLife:
    return SignOfLife(key, Alive(step=step, plan=plan, **reported), now_s)


def begun(key: WorkerKey = A, hang_s: float = 0.0) -> State:
    return play(
        State(), LaunchRequested(key, 60.0, hang_s), CodeReady(key), Started(key, 7, 0.0), HelloReceived(key, 0.0)
    )[0]


def alive(
    begin_s: int, end_s: int, *, step_s: float = 0.0, step: int = 0, key: WorkerKey = A, waits: bool = False
) -> list[Event]:
    """Signs of life and ticks of every second of [begin, end). step_s: 0 stays at `step`."""
    events: list[Event] = []
    for second in range(begin_s, end_s):
        done = step + int((second - begin_s) / step_s) if step_s else step
        events += [sign(key, done, 1, float(second), waits=waits), Ticked(float(second))]
    return events


def test_a_script_that_hangs_is_told_of_once_and_left_alone() -> None:
    """Steps of 2 s, then none: 30 s later one word, with what a step took; steps come again, and stop for longer than
    ever: another."""
    state, todo = play(begun(), *alive(1, 30, step_s=2.0, step=10), *alive(30, 200, step=24))
    (told,) = [one for one in todo if isinstance(one, Notify)]
    assert "no step for 31 s after step 24; one took 2 s before, 2 s at most. It waits for no other rank." in told.text
    assert state.workers[A].phase is Phase.RUNNING
    _, todo = play(state, *alive(200, 230, step_s=2.0, step=25), *alive(230, 800, step=39))
    assert len([one for one in todo if isinstance(one, Notify)]) == 1


def test_what_took_long_once_is_waited_for_three_times_as_long() -> None:
    """Steps of 2 s with an evaluation of 40 s between two of them: an hour later 120 s are nothing new."""
    evaluation = [*alive(1, 30, step_s=2.0, step=10), *alive(30, 69, step=24)]
    state, todo = play(begun(), *evaluation, *alive(69, 3600, step_s=2.0, step=25))
    assert len([one for one in todo if isinstance(one, Notify)]) == 1  # it was the first
    told_s = []
    for second in range(3600, 3800):
        state, todo = play(state, *alive(second, second + 1, step=1790))
        told_s += [second - 3600 for one in todo if isinstance(one, Notify)]
    assert len(told_s) == 1
    assert 118 <= told_s[0] <= 126


def test_a_worker_without_a_first_step_is_reported_once() -> None:
    """A job was "running" for nine minutes without an event: its loader hung before the first step."""
    state, todo = play(begun(), *alive(1, 300, step=0))
    assert todo == []
    (told,) = play(state, *alive(300, 900, step=0))[1]
    assert isinstance(told, Notify)
    assert "no step for 301 s since it began, at step 0. It waits for no other rank" in told.text
    assert play(begun(), *alive(1, 600, step=0, waits=True))[1] == []
    (told,) = play(begun(), *alive(1, 900, step=0, waits=True))[1]
    assert isinstance(told, Notify)
    assert "It waits for other ranks, and so do they" in told.text


def test_whoever_the_others_wait_for_is_told_of_and_they_are_not() -> None:
    """1. Rank 1 hangs: it says so, whatever its rank. 2. Who waits for it does not. 3. Where all wait, rank 0 says that
    later."""
    other = WorkerKey("job-1", 1, 1)
    steps = alive(1, 30, step_s=1.0, step=1, key=other)
    (told,) = play(begun(other), *steps, *alive(30, 70, step=29, key=other))[1]
    assert isinstance(told, Notify)
    assert "It waits for no other rank." in told.text
    assert play(begun(other), *steps, *alive(30, 300, step=29, key=other, waits=True))[1] == []
    first = alive(1, 30, step_s=1.0, step=1)
    assert play(begun(), *first, *alive(30, 85, step=29, waits=True))[1] == []
    (told,) = play(begun(), *first, *alive(30, 95, step=29, waits=True))[1]
    assert isinstance(told, Notify)
    assert "It waits for other ranks, and so do they" in told.text


def test_with_hang_s_who_waits_for_others_is_stopped_after_them() -> None:
    steps = alive(1, 30, step_s=1.0, step=1)
    assert play(begun(hang_s=50), *steps, *alive(30, 80, step=29))[1] != []
    assert play(begun(hang_s=50), *steps, *alive(30, 85, step=29, waits=True))[1] == []
    todo = play(begun(hang_s=50), *steps, *alive(30, 140, step=29, waits=True))[1]
    assert any(isinstance(one, SendStop) for one in todo)


def test_a_worker_whose_peer_was_stopped_has_time_to_say_so() -> None:
    """1. A worker waits for a peer that hangs, for longer than hang_s. 2. The peer is stopped, and the wait ends.
    3. The worker is not stopped as well, unless it does nothing after that."""
    waited = [*alive(1, 30, step_s=1.0, step=1), *alive(30, 85, step=29, waits=True)]
    for until_s, is_stopped in ((95, False), (97, True)):
        todo = play(begun(hang_s=50), *waited, *alive(85, until_s, step=29))[1]
        assert any(isinstance(one, SendStop) for one in todo) == is_stopped


def test_who_hands_its_state_over_does_not_hang() -> None:
    """1. Members of a run change over a thin link: no step for 10 minutes, and bytes move in every piece of 20 s.
    2. They move no more: it is stopped as ever."""
    steps = alive(1, 30, step_s=1.0, step=1)
    moves: list[Event] = []
    for second in range(30, 630):
        view = ViewReport(view=1, handed_bytes=second // 20)
        moves += [sign(A, 29, 1, float(second), view=view), Ticked(float(second))]
    state, todo = play(begun(hang_s=50), *steps, *moves)
    assert not [one for one in todo if isinstance(one, SendStop | Notify)]
    assert any(isinstance(one, SendStop) for one in play(state, *alive(630, 690, step=29))[1])


def test_with_hang_s_it_is_stopped_in_stages_and_counts_as_the_scripts_failure() -> None:
    """1. 50 s without a step: it is asked to stop, so that its last boundary is saved. 2. Its link's thread does so
    and ends it with 75, as if a peer was lost; or nothing happens and it is killed. 3. Either way the script failed."""
    state, todo = play(begun(hang_s=50), *alive(1, 20, step_s=1.0, step=5), *alive(20, 72, step=23))
    (stop,) = [one for one in todo if isinstance(one, SendStop)]
    assert (stop.key, stop.grace_s) == (A, HANG_GRACE_S)
    assert "no step for 51 s after step 23 (hang_s = 50)" in stop.reason
    saved, _ = play(state, Ended(A, 75, False, "rank 0 was asked to stop and is stuck"))
    killed, todo = play(state, *alive(72, 90, step=23), Ended(A, -9, False, ""))
    assert [one.signal for one in todo if isinstance(one, SendSignal)] == [signal.SIGTERM, signal.SIGKILL]
    for state, code in ((saved, 75), (killed, -9)):
        exit = state.workers[A].exit
        assert exit is not None
        assert (exit.kind, exit.code) == (ExitKind.FAILED, code)
        assert "hang_s = 50" in exit.reason


def test_a_start_may_take_longer_than_a_step() -> None:
    """1. A script loads its data for minutes before its first step, or resumes from step 20 and compiles: its user said
    how long a step may take. 2. One that does so for ever is stopped all the same. 3. From its first whole
    step on the user's limit holds."""
    for step in (0, 20):
        loads = alive(1, 290, step=step)
        state, todo = play(begun(hang_s=50), *loads)
        assert not any(isinstance(one, SendStop) for one in todo)
        assert any(isinstance(one, SendStop) for one in play(state, *alive(290, 310, step=step))[1])
        steps = alive(290, 294, step_s=1.0, step=step + 1)
        assert any(isinstance(one, SendStop) for one in play(state, *steps, *alive(294, 350, step=step + 4))[1])


def test_who_comes_to_itself_while_it_is_stopped_has_drained() -> None:
    state, _ = play(
        begun(hang_s=50), *alive(1, 20, step_s=1.0, step=5), *alive(20, 72, step=23), Ended(A, 85, False, "")
    )
    exit = state.workers[A].exit
    assert exit is not None
    assert exit.kind is ExitKind.DRAINED


def test_an_agent_that_was_stopped_itself_takes_nobody_for_hung() -> None:
    state, _ = play(begun(hang_s=50), *alive(1, 20, step_s=1.0, step=5))
    assert play(state, Ticked(500.0), sign(A, 23, 1, 500.5), Ticked(501.0))[1] == []


def test_bytes_of_a_checkpoint_are_progress_and_an_end_that_does_not_come_is_none() -> None:
    """1. The last checkpoint takes longer than hang_s; all ranks wait for it, its bytes move: they once were stopped
    in the middle of it. 2. They stop moving. 3. What is told then is that the worker does not end."""

    def saves(begin_s: int, end_s: int, saved_bytes: int) -> list[Event]:
        """saved_bytes: at the beginning; one more every 10 s where it is not 0."""
        events: list[Event] = []
        for second in range(begin_s, end_s):
            saved = saved_bytes + (second - begin_s) // 10 if saved_bytes else 20
            events += [
                sign(A, 23, 1, float(second), trained=True, saving=True, saved_bytes=saved),
                Ticked(float(second)),
            ]
        return events

    state, todo = play(begun(hang_s=50), *saves(1, 191, 1))
    assert not any(isinstance(one, SendStop) for one in todo)
    state, todo = play(state, *saves(191, 243, 0))
    (stop,) = (one for one in todo if isinstance(one, SendStop))
    assert "no end for 51 s after step 23 (hang_s = 50)" in stop.reason
