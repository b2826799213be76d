"""A model that does not fit: a byte GPT of 25 million parameters with AdamW, under a limit of memory for each worker.

    python benchmarks/stages_memory.py [--limit-mib 480] [--rounds 4]

On a real local cluster of two agents, three jobs (scripts/stages_memory_train.py): one worker without a limit, for its
losses; one worker under the limit, which has to fail; two stages, each under the limit, cut by planner `stages`. The
limit is of private writable memory (RLIMIT_DATA), beyond what the process has once torch is imported."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(TESTS), str(TESTS / "e2e"), str(TESTS / "runtime")]

from cluster import Cluster
from lab.machine import processor

from atoll.strategies.declaration import as_json
from atoll.v1 import jobs_pb2 as pb


def trained(cluster: Cluster, out: Path, stages: int, limit_mib: int, rounds: int) -> list[dict[str, Any]]:
    """What each rank told; empty where the job failed."""
    out.mkdir()
    job = cluster.submit(
        str(HERE / "scripts" / "stages_memory_train.py"), str(out), str(limit_mib), str(rounds),
        workers=(stages, stages), strategy="groups", strategy_settings=as_json({"stages": stages}),
        checkpoint_every=1000,
    )  # fmt: skip
    ended = cluster.wait_for_end(job, deadline_s=600)
    if ended.phase != pb.PHASE_DONE:
        print(f"{stages} stages, {limit_mib} MiB each: {ended.reason}")
        return []
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(stages)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit-mib", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name)) as cluster:
        cluster.local([1.0] * 2)
        folder = Path(name)
        (alone,) = trained(cluster, folder / "alone", 1, 0, options.rounds)
        if trained(cluster, folder / "alone-limited", 1, options.limit_mib, options.rounds):
            raise SystemExit(f"one worker trains with {options.limit_mib} MiB: the limit shows nothing")
        stages = trained(cluster, folder / "stages", 2, options.limit_mib, options.rounds)
        if not stages:
            raise SystemExit(1)
    apart = max(abs(one - other) for one, other in zip(alone["losses"], stages[0]["losses"], strict=True))
    print(f"one worker: {alone['resident_bytes'] / 2**20:.0f} MiB, losses {alone['losses']}")
    each = ", ".join(f"{one['resident_bytes'] / 2**20:.0f}" for one in stages)
    print(f"two stages: {each} MiB, losses {stages[0]['losses']}; at most {apart:.1e} from those of one worker")


if __name__ == "__main__":
    main()
