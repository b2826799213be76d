"""Stage 3: a process group of one rank: abort under a collective, close, and meet again."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import psutil
import torch

import atoll
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import PeerLost
from gpu_check.atoll_runs import import_everything, join_one_rank
from gpu_check.rows import Measured, Rows

ABORTS: Final = 20
SLEEP_CYCLES: Final = 6_000_000_000
"""About three seconds of a GPU."""
ABORT_AFTER_S: Final = 0.5
ROW_LIMIT_S: Final = 20.0
MAX_LEAKED_MIB: Final = 64.0
ENTRIES: Final = 1 << 20


def run(device: str, rows: Rows) -> None:
    import_everything()
    if device == "cuda":
        rows.measure("abort under a collective", _aborted_under_way, ROW_LIMIT_S)
        rows.measure("torch's own wait after an abort", _torch_after_abort, ROW_LIMIT_S)
    else:
        rows.skip("abort under a collective", "gloo's collective of one rank has ended before it can be aborted")
    rows.measure(f"{ABORTS} times: abort, close, meet", partial(_again, device, _abort), ROW_LIMIT_S)
    rows.measure(f"{ABORTS} times: close, meet", partial(_again, device, _close), ROW_LIMIT_S)


def _aborted_under_way() -> Measured:
    """A kernel sleeps ahead of an all_reduce; another thread aborts the group. Waiting for the sum must raise."""
    group = join_one_rank(atoll.init(seed=1))
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    under_way = group.begin_sum(torch.ones(ENTRIES, device="cuda"), "adding up")
    aborted_s: list[float] = []

    def abort() -> None:
        aborted_s.append(time.monotonic())
        group.abort()

    timer = threading.Timer(ABORT_AFTER_S, abort)
    timer.start()
    try:
        under_way.wait()
        said = "wait() RETURNED: the sum would be taken for good"
    except PeerLost as error:
        said = f"wait() raised: {error}"
    ended_s = time.monotonic()
    timer.join()
    closed = group.close_within(10.0)
    ms = 1e3 * (ended_s - aborted_s[0])
    text = f"{said}; {ms:.0f} ms after the abort; {'closed' if closed else 'NOT closed within 10 s'}"
    return "raised" in said and closed, text, {"ms": ms}


def _torch_after_abort() -> Measured:
    """Record what torch itself does, which Atoll must not rely on."""
    import torch.distributed as dist

    group = join_one_rank(atoll.init(seed=1))
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    work = dist.all_reduce(torch.ones(ENTRIES, device="cuda"), group=group.data, async_op=True)
    assert work is not None
    threading.Timer(ABORT_AFTER_S, group.data.abort).start()
    begun_s = time.monotonic()
    try:
        work.wait()
        said = "returned"
    except RuntimeError as error:
        said = f"raised {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return True, f"{said} after {time.monotonic() - begun_s:.1f} s", {}


def _abort(group: Group) -> bool:
    group.abort()
    return group.close_within(10.0)


def _close(group: Group) -> bool:
    group.close()
    return True


def _again(device: str, end: Callable[[Group], bool]) -> Measured:
    run = atoll.init(seed=1)
    group = join_one_rank(run)
    used_mib: list[float] = []
    times_ms: list[float] = []
    for _ in range(ABORTS):
        group.begin_sum(torch.ones(ENTRIES, device=device), "adding up").wait()
        begun_s = time.monotonic()
        if not end(group):
            return False, f"the group did not close within 10 s, the {len(times_ms) + 1}th time", {}
        group = join_one_rank(run)
        times_ms.append(1e3 * (time.monotonic() - begun_s))
        used_mib.append(_used_mib(device))
    leaked = used_mib[-1] - used_mib[0]
    ms = statistics.median(times_ms)
    group.close()
    return leaked <= MAX_LEAKED_MIB, f"{ms:.0f} ms each, {leaked:.1f} MiB leaked", {"ms": ms, "leaked_mib": leaked}


def _used_mib(device: str) -> float:
    if device == "cpu":
        return float(psutil.Process().memory_info().rss) / 2**20
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
