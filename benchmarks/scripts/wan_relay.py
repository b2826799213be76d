"""The relay of a network with latency, in the hub's namespace: python wan_relay.py PORTS ONE_WAY_MS PARENT_PID"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import relay
from lab.lifeline import end_with_parent


def main() -> None:
    count, one_way_ms, parent = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    end_with_parent(parent)
    ports = [relay.open_port(f"port{number}") for number in range(count)]
    print("ready", flush=True)
    relay.pass_on(ports, one_way_ms / 1e3)


if __name__ == "__main__":
    main()
