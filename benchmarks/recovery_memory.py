"""Measures what going on from checkpoints in memory takes: anonymous memory of each rank at its peak, beyond what
it had before, and what it receives.

    python benchmarks/recovery_memory.py [--state-mb 256]

Real processes, one thread each, that meet over the loopback; a machine is a folder in /dev/shm with the shards of its
own ranks and copies of those of the machine before it. The law is that no rank takes more than the state and one shard.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from held_ports import free_port
from lab.machine import processor

SCRIPT = str(HERE / "scripts" / "recover_state.py")
DEADLINE_S = 300


@dataclass(frozen=True)
class Case:
    """lost: machines whose memory is gone, and that are in the next run anew."""

    machines: int
    ranks_each: int
    lost: int

    @property
    def name(self) -> str:
        return f"{self.machines} machines of {self.ranks_each} ranks, {self.lost or 'none'} of them new"


CASES = [Case(2, 1, 0), Case(2, 1, 1), Case(2, 2, 1), Case(4, 1, 1)]


def recovered(case: Case, state_bytes: int) -> list[dict[str, Any]]:
    """What each rank told."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        given = (folder, state_bytes, case.machines, case.ranks_each, case.lost, free_port())
        command = [sys.executable, SCRIPT, *map(str, given)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=DEADLINE_S)
        told: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-mb", type=int, default=256)
    state = parser.parse_args().state_mb << 20
    print(f"{datetime.date.today()}  {processor()}, state of {state / 1e6:.0f} MB")
    print("| machines | shard | most of a rank at its peak | state + 1 shard | received, all ranks | of it, between "
          "machines | longest |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for case in CASES:
        told = recovered(case, state)
        shard = state / (case.machines * case.ranks_each)
        cells = [
            case.name,
            f"{shard / 1e6:.0f} MB",
            f"{max(one['peak_bytes'] for one in told) / 1e6:.0f} MB",
            f"{(state + shard) / 1e6:.0f} MB",
            f"{sum(one['bytes'] for one in told) / 1e6:.0f} MB",
            f"{sum(one['from_elsewhere'] for one in told) / 1e6:.0f} MB",
            f"{max(one['seconds'] for one in told):.2f} s",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
