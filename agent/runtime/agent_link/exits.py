"""Ends a worker on purpose: with codes its agent understands, past handlers that catch every Exception."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import NoReturn


class WorkerExit(SystemExit):
    """Leaves the training script through its `finally` blocks; `except Exception` does not catch it."""


def say(text: str) -> None:
    """One line for the person who reads this worker's output."""
    print(f"atoll: {text}", file=sys.stderr, flush=True)


def end_now(code: int) -> NoReturn:
    """End the process without tearing down collectives: their destructors wait for peers that are gone."""
    for child in multiprocessing.active_children():  # DataLoader workers; multiprocessing's own exit hook will not run
        child.terminate()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pythonw and daemons have none
            stream.flush()
    os._exit(code)
