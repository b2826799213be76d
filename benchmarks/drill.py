"""`atoll drill`, with its tables in markdown for docs/drills.md.

    python benchmarks/drill.py [--minutes 30] [--every 20] [--seed 7] [--strategy dense]

`--minutes 2` is a short run. Exit code 1 where an invariant does not hold; the command itself keeps the evidence then.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from lab.machine import processor

from atoll.drill import report
from atoll.drill.cluster import fresh_folder
from atoll.drill.conduct import conduct
from atoll.drill.schedule import KINDS
from atoll.drill.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--strategy", choices=["dense", "stale-sparse"], default="dense")
    given = parser.parse_args()
    settings = Settings(
        length_s=60 * given.minutes, every_s=given.every, seed=given.seed, machines=4, workers=3, controllers=2,
        kinds=tuple(KINDS), strategy=given.strategy,
    )  # fmt: skip
    folder = fresh_folder()
    try:
        outcome = asyncio.run(conduct(settings, folder, lambda text: print(text, file=sys.stderr, flush=True)))
    finally:
        shutil.rmtree(folder)
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"\n{given.strategy}, seed {given.seed}: {report.summary(outcome)}\n")
    print(report.markdown(report.COLUMNS, report.rows(outcome.recoveries)))
    print()
    print(report.markdown(("invariant", "", "evidence"), report.verdict_rows(outcome)))
    sys.exit(0 if outcome.holds else 1)


if __name__ == "__main__":
    main()
