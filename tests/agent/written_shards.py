"""Shards of a job as its worker left them."""

from __future__ import annotations

from pathlib import Path

import xxhash

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import SlotFile, Tail, bounds

JOB = "vit-3f9a"


def header(step: int, run: int = 2) -> Header:
    model = Fingerprint({"w": ("float32", (4,))})
    numbers = {"epoch": 0, "consumed": 0, "loader_step": step, "world_size": 2, "seed": 0}
    return Header(job=JOB, run=run, step=step, model=model, **numbers)  # type: ignore[arg-type]


def write_shard(folder: Path, shard: int, slot: int, step: int, *, seal: bool = True) -> Path:
    path = folder / f"shard-{shard:04d}-of-0002-slot-{slot}.mem"
    file = SlotFile(path)
    try:
        begin, end = bounds(64, shard, 2)
        data = file.begin(b"{}", xxhash.xxh3_128_digest(b"{}"), end - begin)
        data[:] = 1
        if seal:
            about = {**header(step).to_json(), "model": None}
            tail = Tail(shard, 2, begin, end - begin, 64, about, None, ())
            file.seal(tail.sealed([xxhash.xxh3_64_hexdigest(data.data)]))
    finally:
        file.close()
    return path
