"""Waiting, stopping, forking, the order of tasks: an engine as something that runs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from exchange_job import ALL, RATES, Job, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from own_threads import native_threads, until
from threshold_twin import ThresholdController

from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.kernels import _native
from atoll.kernels.exchange_engine import GradientEngine


def only_threads_are(*names: str) -> bool:
    """Of engines, those of others that were closed just now left out."""
    return until(lambda: native_threads("atoll-pipe") == [*names])


class Background:
    """A call on a thread of its own; `result` joins it."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(call, *args))
        self._thread.start()

    def _run(self, call: Any, *args: Any) -> None:
        try:
            self.outcome = call(*args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.outcome = error

    def result(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


@contextmanager
def waiting_fetch(job: Job, sync_round: int) -> Iterator[Background]:
    background = Background(job.engines[0].fetch, range(len(job.sizes)), sync_round, 10)
    time.sleep(0.05)  # most likely it waits by now; if not, the outcome is the same
    yield background
    background.result()


def test_fetch_waits_for_the_round_it_needs_and_takes_a_newer_one_where_it_is_there() -> None:
    """Staleness 1: the forward pass of round 2 needs round 0's update; tensor 0 already has round 1's."""
    with Job([[0], [1]], [160, 160]) as job:
        for sync_round in range(2):
            job.compress(sync_round, 3)
            job.apply(sync_round)
        job.engines[1].idle(5)
        late = job.engines[1].take_outgoing()
        for message in late:
            if (message.sync_round, message.tensor) != (0, 1):
                assert job.deliver(1, message, 0) is None
        missing = next(message for message in late if (message.sync_round, message.tensor) == (0, 1))
        assert job.engines[0].fetch([0], 0, 5)[0] >= 0
        with waiting_fetch(job, 0) as fetch:
            assert job.deliver(1, missing, 0) is None
            version, fresh, waited_s = fetch.result()
        assert version in (0, 1)
        assert fresh in (1, 2)
        assert 0 < waited_s < 5
        assert job.engines[0].take_stats().stall_s >= waited_s
        job.engines[0].idle(5)
        assert job.engines[0].fetch([0, 1], 0, 0)[:2] == (1, 2)
        assert job.engines[0].fetch([], 0, 0)[:2] == (0, 0)


def test_fail_wakes_those_who_wait_and_meets_those_who_come() -> None:
    with Job([[0], [1]], [160]) as job:
        with waiting_fetch(job, 0) as fetch:
            job.engines[0].fail("rank 1 on node b: connection closed")
            job.engines[0].fail("and then another")
        assert isinstance(fetch.outcome, PeerLost)
        with pytest.raises(PeerLost, match="^rank 1 on node b: connection closed$"):
            job.engines[0].fetch([0], -1, 0)
        job.compress(0, 3)  # what can still be done is done
        job.engines[0].idle(5)
        assert len(job.engines[0].recent_parts()) == 1


def test_close_wakes_those_who_wait_and_ends_the_threads() -> None:
    job = Job([[0], [1]], [160], threads=3)
    assert only_threads_are(*(f"atoll-pipe-{k}" for k in (0, 0, 1, 1, 2, 2)))
    with job, waiting_fetch(job, 0) as fetch:
        job.engines[0].close()
    assert isinstance(fetch.outcome, BadInput)
    job.engines[0].close()
    assert only_threads_are()
    job.engines[0].fail("rank 1 is gone")  # who hears of it on another thread cannot know that it is closed
    for call in (job.engines[0].versions, job.engines[0].take_outgoing, job.engines[0].resume):
        with pytest.raises(BadInput, match="the engine is closed; make a new one"):
            call()
    with pytest.raises(BadInput, match="closed"):
        job.engines[0].compress(0, 0, torch.zeros(160), 1.0, 1)


def test_close_with_queued_work_drops_it_and_lets_the_gradients_go() -> None:
    with Job([[0]], [160]) as job:
        engine, before = job.engines[0], job.shared_params(0)[0].clone()
        engine.quiesce(5)
        gradient = np.ones(160, np.float32)
        gone = weakref.ref(gradient)
        engine.compress(0, 0, gradient, 1.0, 1)
        job.apply(0)
        del gradient
        gc.collect()
        assert gone() is not None
        engine.close()
        assert gone() is None
        assert torch.equal(job.shared_params(0)[0], before)


def test_a_gradient_is_kept_while_it_is_needed_and_no_longer() -> None:
    with Job([[0]], [160]) as job:
        engine = job.engines[0]
        engine.quiesce(5)
        gradient = np.ones(160, np.float32)
        gone = weakref.ref(gradient)
        engine.compress(0, 0, gradient, 1.0, ALL)
        del gradient
        assert gone() is not None
        engine.resume()
        engine.idle(5)
        engine.versions()  # any call lets go of what is done
        assert gone() is None


def test_a_dropped_pipeline_stops_its_threads() -> None:
    shared_param, residual = torch.zeros(16), torch.zeros(16)
    engine = GradientEngine(rank=0, islands=[[0]], threads=2)
    engine.add_tensor(order=0, rule="sgd", shared_param=shared_param, residual=residual)
    engine.compress(0, 0, torch.ones(16), 1.0, 1)
    del engine
    gc.collect()
    assert only_threads_are()


def test_quiesce_holds_everything_still_until_resume() -> None:
    with Job([[0]], [200_000], threads=2) as job:
        engine = job.engines[0]
        for sync_round in range(3):
            job.compress(sync_round, 100)
            job.apply(sync_round)
        engine.quiesce(5)
        version = engine.versions()[0]
        still = [job.shared_params(0)[0].clone(), job.of[0][0].residual.clone()]
        job.compress(3, 100)
        job.apply(3)
        with pytest.raises(DeadlineExceeded, match="tasks are still queued or running"):
            engine.idle(0.1)
        with pytest.raises(DeadlineExceeded, match="the engine is quiesced"):
            engine.fetch([0], 3, 0.1)
        assert engine.versions() == [version]
        assert torch.equal(job.shared_params(0)[0], still[0])
        assert torch.equal(job.of[0][0].residual, still[1])
        engine.quiesce(5)
        engine.resume()
        assert engine.fetch([0], 3, 5)[0] == 3


def test_the_queue_serves_the_next_forward_pass_first() -> None:
    """The backward pass brings the last layer's gradient first; the forward pass needs the first layer first."""
    with Job([[0]], [160] * 4, digest_every=1) as job:
        engine = job.engines[0]
        engine.quiesce(5)
        for sync_round in range(2):
            job.compress(sync_round, ALL)
            job.apply(sync_round)
        engine.resume()
        engine.idle(5)
        done = [(sync_round, tensor) for sync_round, tensor, _ in engine.digests()]
        assert done == [(sync_round, tensor) for sync_round in range(2) for tensor in range(4)]
        assert engine.take_stats().queue_s > 0


def test_messages_leave_for_the_next_forward_pass_first() -> None:
    with Job([[0], [1]], [160] * 3) as job:
        engine = job.engines[0]
        for tensor in (2, 1, 0):
            engine.compress(0, tensor, torch.ones(160), 1.0, 2)
            engine.idle(5)
        assert [message.tensor for message in engine.take_outgoing()] == [0, 1, 2]


def test_the_queue_keeps_a_tensors_rounds_in_order_whatever_the_threads() -> None:
    """Steps compressed at once would share out residual and gradient by chance."""
    alone, many = Job([[0]], [5000], threads=1), Job([[0]], [5000], threads=8)
    with alone, many:
        for job in (alone, many):
            for sync_round in range(20):
                job.compress(sync_round, 9)
                job.apply(sync_round)
            job.fetch(19)
        assert torch.equal(alone.shared_params(0)[0], many.shared_params(0)[0])
        assert torch.equal(alone.of[0][0].residual, many.of[0][0].residual)


def test_ctrl_c_ends_a_wait() -> None:
    with Job([[0], [1]], [160]) as job:
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])

        def interrupted() -> None:
            timer.start()  # in here, for on a busy machine it may come before the wait does
            job.engines[0].fetch([0], 0, 3600)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        timer.join()


def test_a_forked_child_is_told_so_and_ends_without_joining() -> None:
    with Job([[0]], [160], threads=2) as job:
        job.compress(0, 3)
        engine = job.engines[0]
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                engine.versions()
            except BadInput as error:
                said = "belongs to process" in str(error)
            engine.close()
            job.engines.clear()
            del engine
            gc.collect()
            os._exit(0 if said else 1)
        assert os.waitpid(child, 0)[1] == 0
        job.apply(0)
        job.fetch(0)


EXITS_UNCLOSED = """
import os, sys, threading, torch
from atoll.kernels.exchange_engine import GradientEngine
for end in ENDS:
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0, end
else:
    sys.exit()
n = 2_000_000
shared_param, residual, live = torch.zeros(n), torch.zeros(n), torch.zeros(n)
engine = GradientEngine(rank=0, islands=[[0], [1]], threads=2)
engine.add_tensor(order=0, rule="sgd", shared_param=shared_param, residual=residual, live=live)
for round in range(4):
    engine.compress(round, 0, torch.ones(n), 1.0, 5000)
    engine.accumulate(round)
def wait():
    while True:
        try:
            engine.fetch([0], 1, 0.5)
        except Exception:
            pass
if end != "del engine":
    threading.Thread(target=wait, daemon=True).start()
exec(end)
print("end", flush=True)
"""


def test_the_interpreter_exits_cleanly_with_a_pipeline_that_nobody_closed() -> None:
    """While threads of it work, and one waits in it; in a circle of references; dropped just before. Each in a process
    of its own, that had nothing to import."""
    code = EXITS_UNCLOSED.replace("ENDS", repr(["", "keep = [engine]; keep.append(keep)", "del engine"]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n" * 3, "")


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 500),
    st.lists(st.floats(-1, 100, width=32), max_size=60),
    st.lists(st.integers(0, 3000), max_size=40),
    st.integers(1, 500),
)
def test_the_threshold_moves_as_its_twin_in_python_bit_for_bit(
    target: int, scores: list[float], founds: list[int], other_target: int
) -> None:
    plain, native = ThresholdController(target), _native.ThresholdController(target)
    for turn, found in enumerate(founds):
        assert native.needs_sample == plain.needs_sample
        if plain.needs_sample:
            plain.start(scores, 4000)
            native.start(np.array(scores, np.float32), 4000)
        assert native.threshold == plain.threshold
        assert native.update(found) == plain.update(found)
        if turn == 20:
            plain.target = other_target
            native.aim_at(other_target)


def test_statistics_add_up_and_begin_anew() -> None:
    with Job([[0, 1]], [1023, 40]) as job:
        job.compress(0, ALL)
        job.apply(0)
        sent = job.exchange()
        job.fetch(0)
        stats = job.engines[0].take_stats()
        assert stats.chosen_blocks == stats.found_blocks == stats.all_blocks == 64 + 3
        assert stats.payload_bytes == sum(len(message.payload) for rank, message in sent if rank == 0)
        assert stats.tasks == 2 * 4  # compress, decode, sum, settle
        assert min(stats.compress_s, stats.sum_s, stats.update_s, stats.publish_s) > 0
        assert sum(job.engines[0].take_stats()) == 0


def test_its_figures_are_processor_time_however_many_threads_want_the_processors() -> None:
    """1. Forty threads choose from forty tensors at once, on fewer processors: by the wall's clock each counts what the
    others took meanwhile, and a controller that takes that for the cost of an exchange believes it many times dearer.
    2. What is told is what the process had of its processors."""
    with Job([[0, 1]], [400_000] * 40, threads=40) as job:
        begun_s = time.process_time()
        job.compress(0, 1000)
        job.apply(0)
        job.exchange()
        stats = [engine.take_stats() for engine in job.engines]
        taken_s = time.process_time() - begun_s
    assert 0 < sum(one.compress_s + one.sum_s + one.update_s for one in stats) <= taken_s


def test_many_threads_and_rounds_end_in_the_same_shared_params() -> None:
    """Messages move while gradients come, as in a real job; three layouts' worth of tasks at once."""
    with Job([[0, 1], [2, 3]], [3000, 17, 1023], threads=3, live=torch.bfloat16, rule="adam") as job:
        stop = threading.Event()

        def move_messages() -> None:
            while not stop.is_set():
                for rank, engine in enumerate(job.engines):
                    for message in engine.take_outgoing():
                        for receiver in job.receivers(rank, message):
                            assert job.deliver(rank, message, receiver) is None
                stop.wait(0.001)

        def train(rank: int) -> None:
            engine = job.engines[rank]
            for sync_round in range(25):
                for tensor in (2, 1, 0):
                    engine.compress(sync_round, tensor, normal(job.sizes[tensor], rank, sync_round), 0.25, 8)
                engine.apply(sync_round, sync_round + 1, [RATES["adam"]], clip_norm=0.5 if sync_round % 3 else 0.0)
                engine.fetch([0, 1, 2], sync_round - 1, 10)
            engine.fetch([0, 1, 2], 24, 10)

        network = Background(move_messages)
        ranks = [Background(train, rank) for rank in range(4)]
        outcomes = [rank.result() for rank in ranks]
        stop.set()
        assert [*outcomes, network.result()] == [None] * 5
        job.assert_equal_shared_params()
