"""Compares two trees bit for bit: the same seeds under each exchange, losses and weights of every rank.

    git worktree add ../before 397e2aa && make -C ../before setup
    python benchmarks/identity.py ../before/.venv/bin/python [.venv/bin/python] [--ranks 2]

Each case runs as real processes of both interpreters, over loopback. Exits with 1 where a bit differs. Unlike
equivalence.py, which holds unequal workers against one, this holds a change against the code before it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "scripts"))

from identity_train import CASES

from atoll.host.ports import hold_port

DEADLINE_S = 300.0


def trained(python: str, case: str, ranks: int) -> list[list[str]]:
    """What each rank printed. Raises SystemExit with a rank's last words where one failed."""
    with tempfile.TemporaryDirectory() as folder, hold_port() as held:
        environment = {
            **os.environ,
            "PYTHONPATH": "",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
        }
        command = [python, str(HERE / "scripts" / "identity_train.py"), case]
        workers = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [worker.communicate(timeout=DEADLINE_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()  # nothing where it has ended
        for worker, (_, trouble) in zip(workers, said, strict=True):
            if worker.returncode != 0:
                raise SystemExit(f"identity: {python}, case {case!r}: {trouble.strip()[-2000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", help="the interpreter of the other tree's environment")
    parser.add_argument("after", nargs="?", default=sys.executable)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.before is None:
        print("identity: name the interpreter of a tree to compare with; see --help", file=sys.stderr)
        return 2
    differ = 0
    for case in CASES:
        before, after = (trained(python, case, options.ranks) for python in (options.before, options.after))
        same = before == after
        differ += not same
        print(
            f"{'identical' if same else 'DIFFERENT'}: {case}, {len(after[0])} numbers on each of {options.ranks} ranks"
        )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
