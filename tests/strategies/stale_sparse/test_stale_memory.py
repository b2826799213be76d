"""Runs of strategy stale-sparse that are killed and go on from memory. Real worker processes; a test's agent owns the
folders. What was trained up to the generation's step is in the shared parameters, or in a residual: nothing else is
right."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_runs import (
    Tensors,
    check_alike,
    check_every_sample_once,
    check_nothing_was_lost,
    kept,
    sparse,
    together,
)
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import content_of, parse
from atoll.errors import CheckpointError

pytestmark = pytest.mark.timeout(300)

SLOWLY = ("--sleep-s", "0.1")  # of which one percent is more than writing costs
EPOCHS = 6  # however seldom there is a generation, the kill is long before the end
LONG = ("--keep-sums", "--epochs", str(EPOCHS))
EXCHANGES = pytest.mark.parametrize("exchange", ["updates", "gradients"])


class Job:
    """The runs of one job, each rank on a node of its own unless `nodes` says otherwise."""

    def __init__(self, out: Path, start: Start, **settings: Any) -> None:
        self.out, self.start, self.settings, self.runs = out, start, settings, 0
        self.memory = out / "memory"
        out.mkdir(exist_ok=True)

    def agent(self, world_size: int, islands: Sequence[str] | None = None, replicas: int = 1) -> FakeAgent:
        self.runs += 1
        agent = sparse(self.out, world_size, start=self.start, run=self.runs, **self.settings)
        agent.own_directories, agent.memory = True, self.memory
        agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = replicas, 0
        agent.place(
            [f"node-{rank}" for rank in range(world_size)], islands or [f"i{rank}" for rank in range(world_size)]
        )
        return agent

    def killed(self, world_size: int, at_step: int, *more: str, twice: bool = False, **how: Any) -> None:
        """All machines lose power at once, after this step is in memory everywhere. twice: and an older one, too."""
        with self.agent(world_size, **how) as agent:
            agent.start_workers("stale_train.py", str(self.out), *LONG, *SLOWLY, *more)
            if twice:
                agent.wait_until(lambda: len(agent.memory_steps) == world_size and all(agent.memory_steps.values()))
                at_step = max(at_step, *agent.memory_steps.values()) + 1
            agent.lose_power(at_step)

    def ended(self, world_size: int, *more: str, **how: Any) -> tuple[int, list[str]]:
        """A run to the job's end. Returns the step in memory that it went on from, and the notices."""
        with self.agent(world_size, **how) as agent:
            agent.start_workers("stale_train.py", str(self.out), *LONG, *more)
            assert agent.exit_codes() == [0] * world_size, agent.said()
            logs = [(self.out / "job" / f"run-{self.runs}-rank-{rank}.log").read_text() for rank in range(world_size)]
            found = re.findall(r"resumes from step (\d+), from memory", "\n".join(logs))
            assert len(found) == world_size, logs
            assert len(set(found)) == 1, found
            return int(found[0]), [text for text in agent.warnings if "the state is copied to memory every" not in text]

    def kept(self, run: int, world_size: int, what: str) -> list[dict[str, Any]]:
        return [kept(self.out, run, rank, what) for rank in range(world_size)]

    def sums(self, run: int, world_size: int, step: int) -> list[dict[str, Any]]:
        """What each rank's gradients of the run added up to when `step` steps were trained."""
        paths = [self.out / f"run-{run}-rank-{rank}.sums-{step}" for rank in range(world_size)]
        return [{"summed": torch.load(path, weights_only=True)} for path in paths]

    def checkpoints(self) -> list[int]:
        return [one.step for node in (self.out / "job").glob("node-*") for one in listing.newest(node)]

    def shards(self, node: int) -> dict[Path, int]:
        """With their steps, -1 for one that is torn."""
        found = {}
        for path in sorted((self.memory / f"node-{node}").glob("*.mem")):
            try:
                found[path] = parse(content_of(path)).header.step
            except CheckpointError:
                found[path] = -1
        return found


def check_conserved(job: Job, before: int, after: int, exchange: str) -> None:
    """Of a job whose run 1 of `before` ranks was killed and whose run 2 of `after` ended: run 2 began with everything
    that was trained up to its first step, and ended with that and all it trained itself."""
    begun, ended = job.kept(2, after, "begin"), job.kept(2, after, "end")
    step = begun[0]["step"]
    first = job.sums(1, before, step)
    origin: Tensors = kept(job.out, 1, 0, "begin")["shared_params"]
    gradients, residuals = together(first, "summed"), together(begun, "residuals")
    assert any(tensor.any() for tensor in residuals.values())
    check_nothing_was_lost(origin, check_alike(begun, "shared_params"), gradients, residuals, exchange)
    gradients, residuals = together([*first, *ended], "summed"), together(ended, "residuals")
    check_nothing_was_lost(origin, check_alike(ended, "shared_params"), gradients, residuals, exchange)


def test_what_a_rank_has_not_sent_survives_on_its_disk_where_memory_has_no_room(tmp_path: Path, start: Start) -> None:
    """1. Memory of rank 1's machine has no room for its shared parameters' part, residual and moments: without them
    there is no generation. 2. They lie on its disk; all machines lose power. 3. All that was trained is there again."""
    job = Job(tmp_path, start, sparsity=0.9, exchange="gradients")
    for killed in (True, False):
        with job.agent(2) as agent:
            agent.rooms, agent.spill = {1: 1 << 20}, tmp_path / "spill"
            agent.start_workers("stale_train.py", str(job.out), *LONG, *(SLOWLY if killed else ()))
            if killed:
                agent.lose_power(5)
            else:
                assert agent.exit_codes() == [0, 0], agent.said()
    assert job.shards(1) == {}
    assert len(list((tmp_path / "spill" / "node-1").iterdir())) == 2
    check_conserved(job, 2, 2, "gradients")


@EXCHANGES
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_workers_killed_before_anything_is_on_disk_lose_no_residual(
    start: Start, tmp_path: Path, exchange: str, world_size: int
) -> None:
    """1. Nobody waits for the others' updates, some are always under way. 2. SIGKILL for all. 3. The next run goes on
    from memory: shared parameters that are the same on all ranks, and every gradient up to that step in them or still
    in the residual of the rank that had it. 4. It ends, and that holds again."""
    job = Job(tmp_path, start, sparsity=0.9, values="float32", digest_every=3, exchange=exchange)
    job.killed(world_size, at_step=5)
    assert job.checkpoints() == []
    step, notices = job.ended(world_size)
    assert step >= 5
    assert notices == []
    assert job.kept(2, 1, "begin")[0]["step"] == step
    check_conserved(job, world_size, world_size, exchange)
    check_every_sample_once(tmp_path, epochs=EPOCHS)


def test_a_machine_is_lost_and_fewer_go_on_with_the_residuals_of_all(start: Start, tmp_path: Path) -> None:
    """1. Three machines, two in one island, 16 bits on the wire; each one's part is also on the next one. 2. All are
    killed; machine 1 is gone. 3. Two go on: rank 1 takes over the residual of rank 1, from its copy, and one of the two
    that of rank 2. All that was trained counts, also what rounding took from sums that were under way."""
    job = Job(tmp_path, start, sparsity=0.9, values="float16", digest_every=3)
    job.killed(3, at_step=5, islands=["west", "west", "east"], replicas=2)
    shutil.rmtree(job.memory / "node-1")
    (job.memory / "node-2").rename(job.memory / "node-1")  # who is left is counted anew
    step, notices = job.ended(2, replicas=2)
    assert step >= 5
    assert notices == []
    check_conserved(job, 3, 2, "updates")
    check_every_sample_once(tmp_path, epochs=EPOCHS)


def flip_own(path: Path) -> None:
    content = bytearray(path.read_bytes())
    own_at = int.from_bytes(content[40:48], "little")
    content[own_at + 5] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(("damage", "why"), [(flip_own, "own bytes 0 to "), (truncate, "torn")])
def test_a_damaged_part_means_an_older_step_for_all_and_more_ranks_go_on(
    start: Start, tmp_path: Path, damage: Callable[[Path], None], why: str
) -> None:
    """1. Two ranks are killed; rank 1's newest part is damaged on its disk. 2. Three go on from the generation before,
    all of them; the third has no residual yet."""
    job = Job(tmp_path, start, sparsity=0.9, values="float32", digest_every=3)
    job.killed(2, at_step=5, twice=True)
    by_step = {step: path for path, step in job.shards(1).items()}
    older, newest = sorted(by_step)
    if older < 0 or older not in job.shards(0).values():
        pytest.skip("the kill came in the middle of a write; there is no older generation to fall back to")
    damage(by_step[newest])
    step, notices = job.ended(3)
    assert step == older
    assert any("skips a checkpoint in memory" in text and why in text for text in notices), notices
    check_conserved(job, 2, 3, "updates")
    assert not any(tensor.any() for tensor in job.kept(2, 3, "begin")[2]["residuals"].values())


@EXCHANGES
def test_moments_go_through_a_kill_and_the_model_is_that_of_a_calm_run(
    start: Start, tmp_path: Path, exchange: str
) -> None:
    """AdamW, everything sent, no step late: each rank's own moments, which the ranks tell each other of, or those that
    follow the shared parameters."""
    settings = {"sparsity": 0.0, "staleness": 0, "values": "float32", "exchange": exchange}
    flags = ("--adamw", "--epochs", str(EPOCHS))
    calm, job = Job(tmp_path / "calm", start, **settings), Job(tmp_path / "killed", start, **settings)
    with calm.agent(2) as agent:
        agent.start_workers("stale_train.py", str(calm.out), *flags)
        assert agent.exit_codes() == [0, 0], agent.said()
    job.killed(2, 10, *flags)  # told after 8 updates, taken after 16
    job.ended(2, *flags)
    expected, actual = (check_alike(one.kept(one.runs, 2, "end"), "shared_params") for one in (calm, job))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_memory_has_the_state_before_a_flush_or_after_it_never_both(start: Start, tmp_path: Path) -> None:
    """1. At the end of an epoch a generation begins, and its shared parameters are copied late. 2. The script
    synchronizes: all residuals are in the shared parameters now. 3. All die. 4. The next run's shared parameters lack
    it, and every rank has its own."""
    job = Job(tmp_path, start, sparsity=0.9, values="float32", staleness=0)
    with job.agent(2) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--keep-sums", *SLOWLY, "--die-flushed", "--epochs", "20")
        assert agent.exit_codes() == [-signal.SIGKILL] * 2, agent.said()
    step, _ = job.ended(2, "--epochs", "20")
    assert step % 9 == 0
    check_conserved(job, 2, 2, "updates")
