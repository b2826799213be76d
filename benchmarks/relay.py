"""The relay for nodes behind NAT over shaped links: what passes it, and what it adds to a round trip.

    sudo env PATH=$PATH python benchmarks/relay.py [--rounds 3] [--seconds 3]

Three network namespaces: two ends and between them `atoll relay`, each link with a token bucket of the rate in both
directions. direct: one TCP stream between the ends. relayed: the same through the relay, whose link carries each byte
in and out. sealed: besides encrypted by both agents' code, as what torch's collectives send.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "scripts")]

import relay_end
from lab.machine import processor
from lab.network import Network, refuse_without_tools

from atoll.errors import AtollError

DEADLINE_S = 90.0
END = HERE / "scripts" / "relay_end.py"
MODES = ("direct", "relayed", "sealed")
PINGS = 2000
HUB = 2
BURST = "1mb"  # 8 ms of 1 Gbit/s
RELAY = f"{Network.address(HUB)}:7701"
DIRECT = f"{Network.address(1)}:7702"


@contextmanager
def running(argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has said its first line."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        pipe = process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], DEADLINE_S)[0] or not pipe.readline():
            raise SystemExit(f"{argv} said nothing")
        yield process
    finally:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def end(network: Network, place: int, role: str, mode: str, *numbers: float) -> list[str]:
    address = DIRECT if mode == "direct" else RELAY
    argv = [sys.executable, str(END), role, str(os.getpid()), address, mode, *map(str, numbers)]
    return network.inside(place, argv)


def measured(network: Network, mode: str, seconds: float, pings: int) -> dict[str, Any]:
    with running(end(network, 1, "serve", mode)):
        argv = end(network, 0, "measure", mode, seconds, pings)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"{mode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shown(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def compare(network: Network, rates: Sequence[float | None], rounds: int, seconds: float) -> None:
    for rate in rates:
        network.shape(rate, BURST if rate is not None and rate > 100 else "64kb")
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):  # in turn: a busy machine is busy for all
            for mode in MODES:
                found[mode].append(measured(network, mode, seconds, 0)["mbit_s"])
        print(f"\n{'no limit' if rate is None else f'{rate:g} Mbit/s'}: goodput in Mbit/s, median [min-max]")
        for mode in MODES:
            shares = [one / (rate or direct) for one, direct in zip(found[mode], found["direct"], strict=True)]
            print(f"  {mode:8} {shown(found[mode], '.0f'):22} {100 * statistics.median(shares):.1f} % of the", end=" ")
            print("link" if rate else "direct one")
    network.shape(None)
    times: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        for mode in MODES:
            times[mode].append(measured(network, mode, 0, PINGS))
    print(f"\nround trip of 64 bytes in us over {PINGS}, no limit: median [min-max] of medians, of p99")
    for mode in MODES:
        medians, p99 = ([one[name] for one in times[mode]] for name in ("rtt_us", "p99_us"))
        print(f"  {mode:8} {shown(medians, '.0f'):18} {shown(p99, '.0f')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", default="100,1000,0", help="in Mbit/s; 0: no limit")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    try:
        refuse_without_tools()
    except AtollError as error:
        print(error, file=sys.stderr)
        return 2
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{datetime.date.today()}, {processor()}, {os.cpu_count()} cores, load {load}")
    with tempfile.TemporaryDirectory() as folder, Network(3) as network:
        secret = Path(folder, "secret")
        secret.write_bytes(relay_end.SECRET)
        secret.chmod(0o600)
        relay = [sys.executable, "-m", "atoll.cli.main", "relay", "--listen", RELAY, "--secret-file", str(secret)]
        with running(network.inside(HUB, relay)):
            compare(
                network, [float(rate) or None for rate in options.rates.split(",")], options.rounds, options.seconds
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
