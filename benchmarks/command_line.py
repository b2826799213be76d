"""Measures how soon the command line answers: help, version, and one command's help, each in a process of its own.

python benchmarks/command_line.py [--runs 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from lab.machine import processor

COMMANDS = (("--help",), ("version",), ("submit", "--help"))
GOAL_S = 0.5
"""Of help: what a person takes for at once."""


def seconds(arguments: tuple[str, ...]) -> float:
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "atoll.cli.main", *arguments], stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print(processor())
    for arguments in COMMANDS:
        taken = [seconds(arguments) for _ in range(runs)]
        low, high = min(taken), max(taken)
        print(f"atoll {' '.join(arguments):14} {statistics.median(taken):.2f} s ({low:.2f} to {high:.2f})", flush=True)
    print(f"goal: help within {GOAL_S} s")


if __name__ == "__main__":
    main()
