"""Promises of the kernels to the process they run in: no copies, no GIL, no hang after a fork or at exit."""

from __future__ import annotations

import array
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import native_parts
import numpy as np
import psutil
import pytest
import torch
from own_threads import native_threads, until

from atoll import kernels
from atoll.kernels.signs import sign_add

BIG = 2**22


@pytest.mark.parametrize(
    "make", [torch.zeros, lambda n: np.zeros(n, np.float32), lambda n: array.array("f", [0.0] * n)]
)
def test_results_land_in_the_callers_memory(make: type) -> None:
    """torch through the DLPack exchange API, NumPy through DLPack, array.array through the buffer protocol."""
    out = make(1000)
    sign_add(np.zeros(125, np.uint8), np.array([3.0], np.float32), out, two_sided=False)
    assert list(out) == [3.0] * 1000
    assert kernels.squared_norm(out) == 9000.0


def test_no_buffer_is_copied() -> None:
    x = torch.ones(16 * BIG)  # 256 MiB
    bits, scales = torch.zeros(2 * BIG, dtype=torch.uint8), torch.ones(16 * BIG // 1024)
    before = psutil.Process().memory_info().rss
    kernels.squared_norm(x)
    sign_add(bits, scales, x, two_sided=False)
    assert psutil.Process().memory_info().rss - before < 32 * 2**20
    assert x[-1] == 2.0


def test_other_threads_run_while_a_kernel_does() -> None:
    """A thread ticks while the main thread is inside one kernel call; with the GIL held it could tick once at most."""
    x = np.zeros(64 * BIG, np.float32)  # 1 GiB of addresses; pages that are only read take no memory
    ticks, stop = [0], threading.Event()

    def ticking() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=ticking, name="ticking")
    thread.start()
    ends_s, during = time.monotonic() + 30, 0
    try:
        while during <= 10 and time.monotonic() < ends_s:  # others may have the processors during one call
            before = ticks[0]
            kernels.squared_norm(x, threads=1)  # 0.1 s and more
            during = ticks[0] - before
    finally:
        stop.set()
        thread.join(30)
    assert during > 10


def test_callers_on_many_threads_get_their_own_results() -> None:
    buffers = [torch.full((BIG // 4 + i,), float(i)) for i in range(8)]
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda x: kernels.squared_norm(x, 3), buffers * 4))
    assert results == [float(i * i * (BIG // 4 + i)) for i in range(8)] * 4


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    """1. The parent's pool has threads. 2. A child is forked while one of them may hold a lock. 3. The child has none
    of those threads, and must neither wait for them nor give another result. DataLoader workers live like this."""
    x = torch.ones(BIG)
    expected = kernels.squared_norm(x, 4)
    with ThreadPoolExecutor(1) as executor:
        busy = executor.submit(lambda: [kernels.squared_norm(x, 4) for _ in range(50)])
        children = []
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                same = all(kernels.squared_norm(x, threads) == expected for threads in (1, 4, 4))
                os._exit(0 if same else 1)
            children.append(pid)
        codes = [wait_for(pid, deadline_s=60) for pid in children]
        busy.result(30)
    assert codes == [0] * 5
    assert kernels.squared_norm(x, 4) == expected


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=100)


def wait_for(pid: int, deadline_s: float) -> int:
    process = psutil.Process(pid)
    try:
        return int(process.wait(deadline_s))
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(30)
        raise


def test_stopped_threads_are_gone_and_come_back_when_needed() -> None:
    native_parts.stop_threads()  # other tests of this process may have started its pool
    x = torch.ones(BIG)
    kernels.squared_norm(x, 5)
    assert len(native_threads("atoll-kernel")) >= 4
    kernels._native.stop_threads()
    assert until(lambda: not native_threads("atoll-kernel"))
    assert kernels.squared_norm(x, 3) == float(BIG)
    assert len(native_threads("atoll-kernel")) == 2


EXIT_WITH_BUSY_POOL = """
import threading, numpy as np
from atoll import kernels
from atoll.errors import BadInput
x = np.ones(2**24, np.float32)
kernels.squared_norm(x, 8)
def go_on():
    while True:
        kernels.squared_norm(x, 8)
threading.Thread(target=go_on, daemon=True).start()
print(kernels.squared_norm(x, 2))
"""


def test_the_interpreter_exits_cleanly_while_a_daemon_thread_computes() -> None:
    done = python(EXIT_WITH_BUSY_POOL)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{2.0**24}\n", "")


def test_importing_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import array; from atoll import kernels;"
        "print(kernels.squared_norm(array.array('f', [3, 4])), kernels.has_cuda() in (True, False))"
    )
    done = python(code)
    assert done.stdout == "25.0 True\n"


def test_omp_num_threads_limits_the_choice() -> None:
    code = "from atoll import kernels; print(kernels.cpu_features()['threads'])"
    done = python(code, OMP_NUM_THREADS="1,4")
    assert done.stdout == "1\n"
