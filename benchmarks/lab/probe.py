"""Measures what the links really carry, with one TCP stream before anything is timed over them."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

from atoll.errors import DeadlineExceeded
from lab.network import Network
from lab.options import Rate
from lab.trace import Trace

PROBE: Final = Path(__file__).resolve().parent.parent / "scripts" / "wan_probe.py"
SECONDS: Final = 3.0
DEADLINE_S: Final = 30.0


def probe(network: Network, rate: Rate, trace: Trace) -> str:
    """Goodput and idle round trip from worker 1 to worker 0, in words. Raises DeadlineExceeded."""
    with network.shaped(rate, trace):
        argv = network.inside(0, [sys.executable, "-I", str(PROBE), "receive"])
        receiver = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None
            if not select.select([receiver.stdout], [], [], DEADLINE_S)[0] or not receiver.stdout.readline():
                raise DeadlineExceeded(f"the probe of the network does not listen after {DEADLINE_S:g} s")
            argv = network.inside(1, [sys.executable, "-I", str(PROBE), "send", network.address(0), str(SECONDS)])
            subprocess.run(argv, check=True, timeout=DEADLINE_S)
            told, _ = receiver.communicate(timeout=DEADLINE_S)
        except subprocess.SubprocessError as error:
            raise DeadlineExceeded(f"the probe of the network failed: {error}") from error
        finally:
            receiver.kill()
            receiver.wait(DEADLINE_S)
    measured = json.loads(told)
    asked = f" (its mean there {trace.mean(SECONDS / 3, SECONDS):.0f})" if rate.traced else ""
    return f"{rate}{asked}: one TCP stream {measured['mbit_s']:.1f} Mbit/s, round trip {measured['rtt_ms']:.2f} ms"
