"""An agent that serves shards to a run that it has no part in: whom it answers, with what, what its asker believes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from written_shards import write_shard

from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.memory.recovery.outside_shards import OutsideAgents, missing
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import Generation, HeldShard
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.supervisor.shard_server import ShardServer
from atoll.errors import CheckpointError
from atoll.v1.agents_pb2 import ShardHolder

OLD, NEW = Generation(1, 7, 2, "aa"), Generation(1, 8, 2, "aa")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShardServer]:
    server = ShardServer(lambda job: ShardFolders(tmp_path / job))
    server.listen("127.0.0.1")
    yield server
    server.close()


def asker(server: ShardServer) -> tuple[OutsideAgents, bytes]:
    """A worker that knows the agent, and its public key."""
    secret, public = generate()
    named = ShardHolder(node="b", address="127.0.0.1", port=server.port, public_key=server.public_key)
    return OutsideAgents([named], Keys(secret, public, {})), public


def fetched(agents: OutsideAgents, wanted: HeldShard, path: Path) -> bytes:
    file = SlotFile(path)
    try:
        for _ in agents.fetch(wanted, file):
            pass
    finally:
        file.close()
    return path.read_bytes()


def test_a_rank_of_the_run_gets_its_jobs_shards_byte_for_byte(server: ShardServer, tmp_path: Path) -> None:
    """1. Two shards lie there whole, one is being written. 2. A rank of the run is told of the whole ones, and gets
    one. 3. A file that is gone meanwhile is an error."""
    for name in ("vit-1", "other-1", "here"):
        (tmp_path / name).mkdir()
    whole = write_shard(tmp_path / "vit-1", 0, 0, 7)
    write_shard(tmp_path / "vit-1", 1, 2, 7)
    write_shard(tmp_path / "vit-1", 1, 0, 8, seal=False)
    write_shard(tmp_path / "other-1", 0, 0, 9)
    agents, public = asker(server)
    server.allow("vit-1", 3, [public])
    with agents:
        found, troubles = agents.listed()
        assert [(one.generation.step, one.shard, one.slot) for one in found] == [(7, 0, 0), (7, 1, 2)]
        assert troubles == []
        got = fetched(agents, found[0], tmp_path / "here" / "shard-0000-of-0002-slot-0.mem")
        assert got == whole.read_bytes()[: found[0].bytes]
        whole.unlink()
        with pytest.raises(CheckpointError, match=r"reading .*slot-0\.mem"):
            fetched(agents, found[0], tmp_path / "here" / "shard-0000-of-0002-slot-1.mem")


def test_strangers_and_ranks_of_an_older_run_are_not_answered(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit-1").mkdir()
    write_shard(tmp_path / "vit-1", 0, 0, 7)
    (stranger, _), (older, of_older), (newest, of_newest) = asker(server), asker(server), asker(server)
    server.allow("vit-1", 4, [of_newest])
    server.allow("vit-1", 3, [of_older])
    answer_s = "atoll.agent.runtime.checkpoints.memory.recovery.outside_shards.ANSWER_S"
    monkeypatch.setattr(answer_s, 0.5)
    for agents in (stranger, older):
        with agents:
            found, [trouble] = agents.listed()
            assert (found, "holds in memory is not known: " in trouble) == ([], True)
    monkeypatch.setattr(answer_s, 30.0)
    with newest:
        assert len(newest.listed()[0]) == 1
    server.drop("vit-1")


def test_only_what_the_newest_whole_generation_lacks_is_fetched() -> None:
    """It is newer than what the run has whole by itself and than what is on disk; else nothing is."""
    outside = [HeldShard(OLD, 1, 0, 9), HeldShard(NEW, 1, 1, 9), HeldShard(NEW, 1, 1, 9, holder=1)]
    assert [one.generation for one in missing({NEW: {0: 0}, OLD: {0: 0}}, outside, (0, 0))] == [NEW]
    assert [one.generation for one in missing({OLD: {0: 0}}, outside, (0, 0))] == [OLD]
    assert missing({NEW: {0: 0}}, outside, (1, 8)) == []
    assert missing({NEW: {0: 0, 1: 1}}, outside, (0, 0)) == []
    assert missing({}, outside, (0, 0)) == []
