"""One end of what benchmarks/copies.py measures first: a sender that holds copies, or that sends them.

python copies_peer.py ASKED, which is JSON: rank (0 sends, 1 holds), host, secret and public keys, bytes, copies,
folder, parent. Prints what its sender tells; hears what both told; then the sender prints when it began each copy, the
holder when each was whole, both what processor time they used.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.lifeline import end_with_parent

from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders
from atoll.agent.runtime.checkpoints.memory.replication.replica_sender import ReplicaSender
from atoll.agent.runtime.checkpoints.memory.replication.replica_transfer import OutgoingReplica, ReplicaTransfer
from atoll.agent.runtime.checkpoints.memory.shards.shard_store import ShardFiles
from atoll.agent.runtime.transport.keys import Keys

DEADLINE_S = 120.0
TURN_S = 0.002


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    asked = json.loads(sys.argv[1])
    end_with_parent(asked["parent"])
    rank, size, folder = asked["rank"], asked["bytes"], Path(asked["folder"])
    public = {number: bytes.fromhex(key) for number, key in enumerate(asked["public"])}
    keys = Keys(secret=bytes.fromhex(asked["secret"]), public=public[rank], of=public)
    files = {0: ShardFiles(ShardFolders(folder).slots(0, 2, on_disk=False), None, lambda: False)} if rank else {}
    sender = ReplicaSender(run=1, rank=rank, keys=keys, incoming=files, limit_bytes=2 * size, notify=print)
    try:
        print(sender.bind(asked["host"]).hex(), flush=True)
        sender.start([bytes.fromhex(one) for one in sys.stdin.readline().split()], () if rank else (1,))
        if rank == 0:
            path = folder / "own"
            path.write_bytes(os.urandom(1 << 20) * -(-size // (1 << 20)))
        for step in range(1, asked["copies"] + 1):
            if rank == 0:
                sys.stdin.readline()  # the one before is whole
            before_s, begun_s = cpu_s(), time.monotonic()
            if rank == 0:
                sender.send(ReplicaTransfer(step, path, size))
                outgoing = sender._outgoing[1]
                wait(partial(delivered, outgoing, step))
            else:
                wait(partial(held, sender, step))
            at_s = time.monotonic() if rank else begun_s
            print(json.dumps({"at_s": at_s, "cpu_s": cpu_s() - before_s}), flush=True)
        if rank == 0:
            seen = sender._outgoing[1].path
            print(json.dumps({"window": seen.window_bytes, "chunk": seen.chunk_bytes}), flush=True)
    finally:
        sender.close()


def delivered(outgoing: OutgoingReplica, step: int) -> bool:
    transfer = outgoing._transfer
    return transfer is not None and transfer.step == step and outgoing.done


def held(sender: ReplicaSender, step: int) -> bool:
    return sender.done_step == step


def wait(what: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not what():
        if time.monotonic() > ends_s:
            raise SystemExit(f"a copy is not whole after {DEADLINE_S:g} s")
        time.sleep(TURN_S)


if __name__ == "__main__":
    main()
