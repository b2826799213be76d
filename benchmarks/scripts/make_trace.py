"""Makes traces/wan.csv again, or another one: python make_trace.py [--seconds 600] [--seed N] > wan.csv"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import trace

SEED = 285  # of 400 tried: the mean of its first minute and of the whole are alike


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    print("seconds,mbit_s")
    for second, rate in enumerate(trace.generate(options.seconds, options.seed)):
        print(f"{second},{rate:.1f}")


if __name__ == "__main__":
    main()
