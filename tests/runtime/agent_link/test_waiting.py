"""Whose waits count as the training thread's."""

from __future__ import annotations

import _thread
import threading

from atoll.agent.runtime.agent_link.waiting import Waiting


def seen_inside(waiting: Waiting, *, started_by_python: bool) -> bool:
    """Return whether a wait of another thread counts, while that thread waits."""
    seen, ended = [], threading.Event()

    def wait() -> None:
        with waiting:
            seen.append(bool(waiting))
        ended.set()

    if started_by_python:
        threading.Thread(target=wait).start()
    else:  # as autograd's threads, which the module `threading` learns of when they first run Python
        _thread.start_new_thread(wait, ())
    assert ended.wait(10)
    return seen[0]


def test_waits_of_the_script_and_of_its_backward_pass_count() -> None:
    """1. On CUDA the hooks of a backward pass run in autograd's own thread, and wait there for the peers' gradients.
    2. Where such a wait did not count, the rank that waited looked like the one that hangs."""
    waiting = Waiting()
    with waiting:
        assert waiting
    assert not waiting
    assert seen_inside(waiting, started_by_python=False)
    assert not seen_inside(waiting, started_by_python=True)
    assert not waiting
