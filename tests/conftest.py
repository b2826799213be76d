"""Every test cleans up after itself: a thread or child process that outlives it fails it.

Tests run with the usual signals, however pytest was started: a shell's `&` and nohup leave some of them ignored, and
every process that a test starts would inherit that."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # for held_ports and shared_processes

from shared_processes import descendants, is_shared

for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that does other things as well; every test has a timeout anyway.
settings.register_profile("atoll", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("atoll")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    children_before = descendants()
    yield
    children = [p for p in descendants() - children_before if not is_shared(p)]
    _, alive = psutil.wait_procs(children, timeout=30)
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in left:
        thread.join(timeout=30)
    names = [t.name for t in left if t.is_alive()]
    assert (names, [p.cmdline() for p in alive]) == ([], [])
