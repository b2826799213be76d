"""Whole runs that are killed and go on from memory. Real worker processes; a test's agent owns the folders."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import content_of, parse
from atoll.errors import CheckpointError

pytestmark = pytest.mark.timeout(240)

EPOCHS, STEPS = 6, 54
ARGUMENTS = ("--epochs", str(EPOCHS), "--adam")
Line = dict[str, Any]
Undisturbed = Callable[[int], list[list[Line]]]


def lines(out: Path, world_size: int) -> list[list[Line]]:
    """By rank, what each trained; of a step that was trained again after a resume, the last time."""
    by_rank = []
    for rank in range(world_size):
        by_step: dict[int, Line] = {}
        for log in sorted(out.glob(f"run-*-rank-{rank}.jsonl")):
            by_step.update({line["step"]: line for line in map(json.loads, log.read_text().splitlines())})
        by_rank.append([by_step[step] for step in sorted(by_step)])
    return by_rank


def first_and_last(out: Path, run: int) -> tuple[int, int]:
    steps = [json.loads(line)["step"] for line in (out / f"run-{run}-rank-0.jsonl").read_text().splitlines()]
    return steps[0], steps[-1]


class Job:
    """The runs of one job, each rank on a node of its own."""

    def __init__(self, folder: Path, start: Start, name: str = "job") -> None:
        self.start = start
        self.out = folder / name
        self.out.mkdir()
        self.memory = self.out / "memory"
        self.runs = 0

    def agent(self, world_size: int, **settings: Any) -> FakeAgent:
        self.runs += 1
        job = settings.pop("job", "tiny-test")
        agent = FakeAgent(self.out, run=self.runs, world_size=world_size, job=job, start=self.start)
        agent.own_directories, agent.memory = True, self.memory
        agent.spec.checkpoint.memory_replicas = settings.pop("replicas", 2)
        agent.spec.checkpoint.every_steps = settings.pop("every_steps", 0)
        agent.place([f"node-{rank}" for rank in range(world_size)], ["here"] * world_size)
        for name, value in settings.items():
            setattr(agent, name, value)
        return agent

    def killed(self, world_size: int, at_step: int, *more: str, **settings: Any) -> list[str]:
        """A run whose machines all lose power at once, after this step is in memory everywhere, and where checkpoints
        are due on disks one is there. Its workers get no further than a few steps. Returns the notices."""
        holds = ("--often", "--await-stop-at", str(at_step + 4))
        with self.agent(world_size, **settings) as agent:
            agent.start_workers("regression.py", str(self.out), *ARGUMENTS, *holds, *more)
            agent.wait_until(lambda: agent.checkpoint_step >= agent.spec.checkpoint.every_steps)
            agent.lose_power(at_step)
            return [notice.text for notice in agent.notices]

    def ended(self, world_size: int, *more: str, **settings: Any) -> tuple[str, list[str]]:
        """A run to the job's end. Returns what its workers printed, and the notices."""
        with self.agent(world_size, **settings) as agent:
            agent.start_workers("regression.py", str(self.out), *ARGUMENTS, *more)
            assert agent.exit_codes() == [0] * world_size, agent.said()
            printed = [self.log(rank) for rank in range(world_size)]
            return "\n".join(printed), [notice.text for notice in agent.notices]

    def log(self, rank: int) -> str:
        return (self.out / "job" / f"run-{self.runs}-rank-{rank}.log").read_text()

    def shards(self, node: int) -> list[Path]:
        return sorted((self.memory / f"node-{node}").glob("*.mem"))

    def newest_step(self, node: int) -> int:
        return max(step_of(path) for path in self.shards(node))

    def checkpoints(self) -> list[int]:
        return [one.step for node in (self.out / "job").glob("node-*") for one in listing.newest(node)]


def step_of(path: Path) -> int:
    try:
        return parse(content_of(path)).header.step
    except CheckpointError:
        return -1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Undisturbed:
    """What so many ranks train where nothing happens."""

    @cache
    def trained(world_size: int) -> list[list[Line]]:
        job = Job(tmp_path_factory.mktemp("undisturbed"), start)
        job.ended(world_size, replicas=0)
        return lines(job.out, world_size)

    return trained


def resumed_at(printed: str) -> int:
    found = re.findall(r"resumes from step (\d+), from memory", printed)
    assert len(set(found)) == 1, printed
    return int(found[0])


def test_a_killed_worker_goes_on_at_the_newest_step_in_memory_and_no_disk_is_touched(
    tmp_path: Path, start: Start, undisturbed: Undisturbed
) -> None:
    """1. One worker, no checkpoints on disk. 2. SIGKILL. 3. The next run begins at the newest step that is in memory
    whole: the one under way, or some before it where a busy machine keeps fewer. 4. All losses, random numbers and
    counters are those of a run that nobody disturbed."""
    job = Job(tmp_path, start)
    job.killed(1, at_step=6)
    assert job.checkpoints() == []
    newest, (_, last) = job.newest_step(0), first_and_last(job.out, 1)
    assert 6 <= newest <= last + 1  # a line is written before its update
    printed, _ = job.ended(1)
    assert first_and_last(job.out, 2)[0] == resumed_at(printed) == newest
    assert lines(job.out, 1) == undisturbed(1)


def test_all_workers_killed_at_once_and_a_machine_lost_its_memory(
    tmp_path: Path, start: Start, undisturbed: Undisturbed
) -> None:
    """1. Three machines, each shard on its own and on the next. 2. All die, one machine's memory is gone. 3. Its shard
    comes from the machine that held its copy; every bit of training is as if nothing had happened. 4. Again, with the
    memory of the one that helped before."""
    job = Job(tmp_path, start)
    for run, lost in ((1, 1), (2, 2)):
        job.killed(3, at_step=5 * run)
        assert {path.name[:16] for path in job.shards(lost)} == {
            f"shard-{lost:04d}-of-00",
            f"shard-{lost - 1:04d}-of-00",
        }
        shutil.rmtree(job.memory / f"node-{lost}")
    assert job.checkpoints() == []
    printed, _ = job.ended(3)
    assert resumed_at(printed) >= 10
    assert lines(job.out, 3) == undisturbed(3)


def test_fewer_machines_go_on_from_the_shards_of_more(tmp_path: Path, start: Start) -> None:
    """1. Three ranks wrote thirds. 2. One machine is lost; the two others go on and write halves; the
    thirds are gone once those are complete. 3. One goes on alone from the halves that are on its machine."""
    job = Job(tmp_path, start)
    job.killed(3, at_step=4)
    shutil.rmtree(job.memory / "node-1")
    (job.memory / "node-2").rename(job.memory / "node-1")  # who is left is counted anew
    job.killed(2, at_step=9)
    assert first_and_last(job.out, 2)[0] >= 4
    assert {path.name[:18] for node in (0, 1) for path in job.shards(node)} == {
        "shard-0000-of-0002",
        "shard-0001-of-0002",
    }
    printed, _ = job.ended(1)
    assert resumed_at(printed) >= 9
    steps = [line["step"] for line in lines(job.out, 3)[0]]
    assert steps == list(range(STEPS))


def test_both_machines_of_a_pair_lost_means_the_disk(tmp_path: Path, start: Start, undisturbed: Undisturbed) -> None:
    """1. Checkpoints on disk every 4 steps, in memory every step. 2. Machines 0 and 1 lose their memory: nobody has
    shard 0 any more. 3. All go on from the same step on disk, and what memory still holds is not mixed in."""
    job = Job(tmp_path, start)
    job.killed(3, at_step=6, every_steps=4)
    for node in (0, 1):
        shutil.rmtree(job.memory / f"node-{node}")
    newest = job.newest_step(2)
    for node in (job.out / "job").glob("node-*"):
        for one in listing.newest(node):
            if one.step >= newest:
                shutil.rmtree(one.path)
    on_disk = max(job.checkpoints())
    assert on_disk < newest
    printed, _ = job.ended(3)
    assert set(re.findall(r"resumes from step (\d+)(, from memory)?", printed)) == {(str(on_disk), "")}
    assert lines(job.out, 3) == undisturbed(3)


def test_what_is_on_disk_at_the_same_step_or_later_is_used(tmp_path: Path, start: Start) -> None:
    """A survivor of a lost peer writes the last step to disk; memory has nothing newer."""
    job = Job(tmp_path, start)
    with job.agent(2) as agent:
        agent.start_workers("regression.py", str(job.out), *ARGUMENTS, "--often", "--sleep-s", "0.1")
        agent.wait_until(lambda: len(agent.memory_steps) == 2 and min(agent.memory_steps.values()) >= 4)
        agent.workers[1].send_signal(signal.SIGKILL)
        assert agent.exit_codes() == [75, -signal.SIGKILL], agent.said()
        saved = agent.checkpoint_step
    assert job.newest_step(0) <= saved
    printed, _ = job.ended(2)
    assert set(re.findall(r"resumes from step (\d+)(, from memory)?", printed)) == {(str(saved), "")}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    at = content.find(b'"exp_avg')
    content[at] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(("damage", "why"), [(flip, "not what was written"), (truncate, "torn")])
def test_a_damaged_shard_is_refused_and_an_older_generation_used(
    tmp_path: Path, start: Start, undisturbed: Undisturbed, damage: Callable[[Path], None], why: str
) -> None:
    """The newest shard of the only rank is damaged; the generation before it is whole, and training is the same."""
    job = Job(tmp_path, start)
    job.killed(1, at_step=5)
    steps = sorted((step_of(path), path) for path in job.shards(0))
    if steps[0][0] < 0:  # killed in the middle of a write: one is whole
        pytest.skip("the kill came in the middle of a write; there is no older generation to fall back to")
    damage(steps[1][1])
    printed, notices = job.ended(1)
    assert resumed_at(printed) == steps[0][0]
    assert any("skips a checkpoint in memory" in text and why in text for text in notices), notices
    assert lines(job.out, 1) == undisturbed(1)


def killed_between_writes(job: Job, at_step: int) -> tuple[list[int], list[str]]:
    """Runs of three, each shard on each machine, that are killed until all files are whole. Returns the two generations
    that are there then, the older one first, and the notices."""
    said: list[str] = []
    for at in range(at_step, STEPS - 15, 3):
        said += job.killed(3, at_step=at, replicas=3)
        found = {step_of(path) for node in range(3) for path in job.shards(node)}
        if len(found) == 2 and -1 not in found:
            return sorted(found), said
    raise AssertionError("all kills came in the middle of a write")


def test_a_lost_machines_part_is_not_taken_from_a_damaged_copy(
    tmp_path: Path, start: Start, undisturbed: Undisturbed
) -> None:
    """1. Each of three machines holds all three parts. 2. All die, the first with its memory. 3. The newest copy of its
    part on the second has a flipped byte: that of the third is used. 4. Again, and the third's has one too: all go on
    from the generation before. 5. Training is as if nothing had happened."""
    job = Job(tmp_path, start)
    refused = "rank {} skips a checkpoint in memory: shard-0000-of-0003-slot-"

    def lose_first_and_damage(*nodes: int) -> None:
        shutil.rmtree(job.memory / "node-0")
        for node in nodes:
            flip(max((path for path in job.shards(node) if path.name.startswith("shard-0000")), key=step_of))

    (_, newest), _ = killed_between_writes(job, at_step=4)
    lose_first_and_damage(1)
    number = job.runs + 1
    (older, _), notices = killed_between_writes(job, at_step=newest + 3)
    assert first_and_last(job.out, number)[0] == newest
    assert any(text.startswith(refused.format(1)) and "not what was written" in text for text in notices), notices
    assert job.checkpoints() == []
    lose_first_and_damage(1, 2)
    printed, notices = job.ended(3, replicas=3)
    assert resumed_at(printed) == older
    assert all(any(text.startswith(refused.format(node)) for text in notices) for node in (1, 2)), notices
    assert lines(job.out, 3) == undisturbed(3)


def test_shards_of_another_model_or_job_are_refused_by_name(tmp_path: Path, start: Start) -> None:
    job = Job(tmp_path, start)
    job.killed(2, at_step=4)
    kept = tmp_path / "kept"
    shutil.copytree(job.memory, kept)
    printed, notices = job.ended(2, "--hidden", "17")
    assert "goes on from" not in printed
    assert any("is of another model: tensor 0.bias is float32 [16] in the checkpoint" in text for text in notices)

    other = Job(tmp_path, start, "other")
    shutil.copytree(kept, other.memory)
    other.runs = 1
    printed, notices = other.ended(2, job="tiny-other")
    assert "goes on from" not in printed
    assert any("of job 'tiny-test', not of 'tiny-other'" in text for text in notices), notices


def test_too_little_room_is_said_with_figures_before_the_first_step(tmp_path: Path, start: Start) -> None:
    job = Job(tmp_path, start)
    _, notices = job.ended(2, memory_bytes=1 << 20, every_steps=5)
    told = {text for text in notices if "MB are free" in text}
    assert len(told) == 2  # each rank speaks for its machine
    assert all("no checkpoints in memory: they take" in text and "1.0 MB are free" in text for text in told)
    assert job.shards(0) == job.shards(1) == []
    assert max(job.checkpoints()) == STEPS


def test_a_machine_with_little_room_holds_its_own_state_and_no_copy(tmp_path: Path, start: Start) -> None:
    """1. Rank 1's machine has room for its own part, not for a copy of rank 0's. 2. Nothing was kept in memory then, on
    no machine. 3. Now that copy lies on the third machine, with an event; all lose power, and go on from memory."""
    job = Job(tmp_path, start)
    notices = job.killed(3, at_step=4, rooms={1: 3 << 20})
    (told,) = {text for text in notices if "does not fit" in text}
    assert "the copy of rank 0's state" in told
    assert "does not fit on node-1, where rank 1 has 3.1 MB, and lies on node-2 instead" in told
    names: Sequence[set[str]] = [{path.name[:10] for path in job.shards(node)} for node in range(3)]
    assert names == [{"shard-0000", "shard-0002"}, {"shard-0001"}, {"shard-0000", "shard-0001", "shard-0002"}]
    shutil.rmtree(job.memory / "node-0")
    printed, _ = job.ended(3)
    assert resumed_at(printed) >= 4


def test_a_shard_without_room_in_memory_lies_on_its_machines_disk(tmp_path: Path, start: Start) -> None:
    """1. Rank 1's machine has no room for its own part. 2. Nothing was kept in memory then, on no machine. 3. Now that
    part lies on its disk, and nobody's copy lies there; all lose power, and go on from it. 4. Memory has room again:
    the part is there, and what was on the disk is gone."""
    job, spill = Job(tmp_path, start), tmp_path / "spill"
    notices = job.killed(3, at_step=4, rooms={1: 1 << 20}, spill=spill)
    assert any(f"They are files in {spill / 'node-1'} instead" in text for text in notices), notices
    assert not [text for text in notices if "no checkpoints in memory" in text]
    names: Sequence[set[str]] = [{path.name[:10] for path in job.shards(node)} for node in range(3)]
    assert (names[1], {path.name[:10] for path in (spill / "node-1").iterdir()}) == (set(), {"shard-0001"})
    assert names[0] | names[2] == {"shard-0000", "shard-0001", "shard-0002"}
    for node in (0, 2):  # copies of it: what is on the disk is all there is
        for path in job.shards(node):
            if path.name.startswith("shard-0001"):
                path.unlink()
    printed = job.killed(3, at_step=8, spill=spill)
    assert resumed_at("\n".join(job.log(rank) for rank in range(3))) >= 4, printed
    assert {path.name[:10] for path in job.shards(1)} >= {"shard-0001"}
    assert list((spill / "node-1").iterdir()) == []


def test_one_machine_without_a_folder_means_disks_for_all(tmp_path: Path, start: Start) -> None:
    """All ranks look, meet and decide together, also those whose agent has nothing for them."""
    job = Job(tmp_path, start)
    _, notices = job.ended(2, without_memory={1})
    assert any("for rank 1" in text and "its agent could not make a folder there" in text for text in notices), notices
    assert any("another rank cannot write its part" in text for text in notices), notices
    assert max(job.checkpoints()) == STEPS


def test_memory_that_fills_up_ends_the_tier_on_all_ranks_and_nothing_else(
    tmp_path: Path, start: Start, undisturbed: Undisturbed, small_disk: Callable[[int], Path]
) -> None:
    """Rank 1's machine has room as it seems, and then has not. All say why, and train to the end."""
    job = Job(tmp_path, start)
    job.memory.mkdir()
    (job.memory / "node-1").symlink_to(small_disk(8 * 1024))
    _, notices = job.ended(2, "--sleep-s", "0.02")
    assert any("No space left" in text for text in notices), notices
    assert any("another rank cannot write its part" in text for text in notices), notices
    assert lines(job.out, 2) == undisturbed(2)


def test_without_replicas_each_machine_keeps_its_own_part_alone(tmp_path: Path, start: Start) -> None:
    job = Job(tmp_path, start)
    job.killed(2, at_step=4, replicas=1)
    names: Sequence[set[str]] = [{path.name[:18] for path in job.shards(node)} for node in (0, 1)]
    assert names == [{"shard-0000-of-0002"}, {"shard-0001-of-0002"}]
    printed, _ = job.ended(2, replicas=1)
    assert resumed_at(printed) >= 4
