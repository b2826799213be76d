"""The ranks of a run that goes on from memory, for recovery_memory.py: what each takes of memory, and receives.

    recover_state.py FOLDER STATE_BYTES MACHINES RANKS_EACH LOST PORT

Machines are folders. First a generation of run 1 is left in them as its ranks would: each machine has the shards of its
own ranks and copies of those of the machine before it; then the last LOST machines lose theirs. The ranks of run 2 are
forked, so that torch is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.checkpoints import restore
from atoll.agent.runtime.checkpoints.disk.header import fingerprint
from atoll.agent.runtime.checkpoints.disk.shard_folders import file_name
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile
from atoll.agent.runtime.checkpoints.memory.shards.shard_state import BoundaryShard
from atoll.agent.runtime.checkpoints.memory.shards.shard_writer import ShardWriter
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import NothingBeside
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.session import CheckpointSettings, MemorySettings
from atoll.agent.runtime.transport import meeting
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.dense.settings import Dense

STEP: Final = 7
DEADLINE_S: Final = 120
_TENSOR_ENTRIES: Final = 250_000


class Cluster:
    def __init__(self, folder: str, state_bytes: str, machines: str, ranks_each: str) -> None:
        self.folder = Path(folder)
        self.each = int(ranks_each)
        self.ranks = int(machines) * self.each
        self.nodes = tuple(f"machine-{rank // self.each}" for rank in range(self.ranks))
        tensors = int(state_bytes) // 3 // 4 // _TENSOR_ENTRIES  # a weight and AdamW's two moments, float32
        self.model = nn.ParameterList([torch.zeros(_TENSOR_ENTRIES) for _ in range(tensors)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def session(self, run: int, rank: int, group: Group | None, port: int = 1) -> Any:
        place = WorkerPlace(rank, self.ranks, rank % self.each, self.each, "127.0.0.1", None)
        machine = self.folder / self.nodes[rank]
        machine.mkdir(exist_ok=True)
        return SimpleNamespace(
            place=place,
            device=torch.device("cpu"),
            job="recover",
            strategy=Dense(),
            run=run,
            view=1,
            seed=1,
            group=group,
            checkpoint=CheckpointSettings(directory=machine / "disk", every_steps=0, keep=1),
            memory=MemorySettings(folder=machine, room_bytes=1 << 40, nodes=self.nodes, kept_by=()),
            notice=lambda level, text: print(text, file=sys.stderr),
        )


def write(cluster: Cluster) -> None:
    for index, parameter in enumerate(cluster.model.parameters()):
        parameter.grad = torch.full_like(parameter, float(index + 1))
    cluster.optimizer.step()
    snapshot = Snapshot(cluster.model, cluster.optimizer, {}, NothingBeside())
    snapshot.take(Position(epoch=0, consumed=0, step=STEP))
    machines = cluster.ranks // cluster.each
    for rank in range(cluster.ranks):
        for copy in range(2):
            machine = cluster.folder / f"machine-{(rank // cluster.each + copy) % machines}"
            machine.mkdir(exist_ok=True)
            session = cluster.session(1, rank, None)
            shard = BoundaryShard(snapshot, rank, cluster.ranks, None)
            shard.look()
            writer = ShardWriter(session, snapshot, shard, inline=True, written=lambda write: None)
            file = SlotFile(machine / file_name(rank, cluster.ranks, 0))
            writer.begin(STEP, file)
            writer.close()
            if writer.failed is not None:
                raise writer.failed
            file.close()


class PeakWatch:
    """The most anonymous memory that this process has while it is on."""

    def __init__(self) -> None:
        self.peak = self.before = anonymous_bytes()
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._off.set()
        self._thread.join(10)
        self.peak = max(self.peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._off.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the kernel does not tell RssAnon")


def recover(cluster: Cluster, port: int, rank: int) -> dict[str, Any]:
    place = WorkerPlace(rank, cluster.ranks, rank % cluster.each, cluster.each, "127.0.0.1", None)
    environment(place, port)
    group = meeting.join(place, torch.device("cpu"))
    received: dict[str, int] = {"bytes": 0, "from_elsewhere": 0}
    if group is not None:
        count_received(group, cluster.nodes, received)
        group.barrier()
    session = cluster.session(2, rank, group)
    begun_s = time.monotonic()
    with PeakWatch() as watch:
        found = restore.find(session, session.checkpoint.directory, fingerprint(cluster.model.state_dict()))
        if found is None or found.generation is None:
            raise SystemExit("nothing was found in memory")
        resumed = restore.Resumed(found.checkpoint, found.own)
        resumed.restore(cluster.model, cluster.optimizer, fingerprint(cluster.model.state_dict()))
    took_s = time.monotonic() - begun_s
    check(cluster)
    if group is not None:
        group.barrier()
        group.close()
    return {"rank": rank, "peak_bytes": watch.peak - watch.before, "seconds": took_s, **received}


def environment(place: WorkerPlace, port: int) -> None:
    os.environ.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def count_received(group: Group, nodes: tuple[str, ...], received: dict[str, int]) -> None:
    pass_on: Callable[..., None] = group._pass_on

    def counted(piece: Any, source: int, to: int) -> None:
        if to == group.rank:
            received["bytes"] += piece.nbytes
            received["from_elsewhere"] += piece.nbytes * (nodes[source] != nodes[to])
        pass_on(piece, source, to)

    group._pass_on = counted  # type: ignore[method-assign]


def check(cluster: Cluster) -> None:
    """The state is that of `write`."""
    states = cluster.optimizer.state_dict()["state"]
    for index, state in states.items():
        moment = state["exp_avg"]
        if not torch.allclose(moment, torch.full_like(moment, 0.1 * (index + 1))):
            raise SystemExit(f"the moment of tensor {index} is another one")
    if len(states) != len(cluster.model):
        raise SystemExit("moments are missing")


def in_processes(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, of a child of this process. SystemExit where one fails or takes too long."""
    fork = multiprocessing.get_context("fork")
    ends = [fork.Pipe(duplex=False) for _ in works]

    def child(work: Callable[[], Any], end: Connection) -> None:
        torch.set_num_threads(1)
        end.send_bytes(json.dumps(work()).encode())

    children = [fork.Process(target=child, args=(work, end)) for work, (_, end) in zip(works, ends, strict=True)]
    for one in children:
        one.start()
    try:
        if not all(end.poll(DEADLINE_S) for end, _ in ends):
            raise SystemExit("a process is late")
        return [json.loads(end.recv_bytes()) for end, _ in ends]
    finally:
        for one in children:
            one.kill()
            one.join(10)


def main(folder: str, state_bytes: str, machines: str, ranks_each: str, lost: str, port: str) -> None:
    shape = (folder, state_bytes, machines, ranks_each)
    in_processes([lambda: write(Cluster(*shape))])
    for machine in range(int(machines) - int(lost), int(machines)):
        for file in Path(folder, f"machine-{machine}").iterdir():
            file.unlink()
    ranks = range(int(machines) * int(ranks_each))
    print(json.dumps(in_processes([partial(lambda rank: recover(Cluster(*shape), int(port), rank), r) for r in ranks])))


if __name__ == "__main__":
    main(*sys.argv[1:])
