"""A daemon in the foreground ends in order when it is asked to, and at once when it is asked twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SERVES = """
import asyncio, signal, sys
from atoll.cli.commands.daemons import run_until_told

if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

async def serve(stop: asyncio.Event) -> None:
    print("serves", flush=True)
    await stop.wait()
    print("stops", flush=True)
    if "hangs" in sys.argv:
        await asyncio.Event().wait()

run_until_told(serve)
"""


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVES, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert said(process) == "serves"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_in_order(number: signal.Signals) -> None:
    with serving() as process:
        process.send_signal(number)
        assert said(process) == "stops"
        assert process.wait(30) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with serving("hangs") as process:
        process.send_signal(signal.SIGTERM)
        assert said(process) == "stops"
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 128 + signal.SIGHUP


def test_under_nohup_it_outlives_its_terminal() -> None:
    with serving("nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert said(process) == "stops"
        assert process.wait(30) == 0
