"""What a user sees, over real gRPC, of a job that one island would train sooner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from daemons import Controller, controller, leading
from fake_agent import FakeAgent

from atoll.controller.jobs.lifecycle import reconciler
from atoll.v1 import jobs_pb2 as pb

PROFILE_EVERY_S = 0.25


@pytest.fixture
async def head(etcd: str, tmp_path: Path) -> AsyncIterator[Controller]:
    async with controller(tmp_path, etcd) as one:
        yield await leading(one)


@pytest.mark.timeout(400)
async def test_two_islands_that_wait_for_their_link_are_told_of_one_exactly_once(
    head: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two islands compute 32 samples each in 20 ms, and their steps take 100. 2. Once the run is steady its events
    say that one alone has all 64 after 50 ms, and so does its status. 3. More such profiles tell nothing more."""
    monkeypatch.setattr(reconciler, "PROFILE_EVERY_S", PROFILE_EVERY_S)
    a, b = FakeAgent("a"), FakeAgent("b")
    b.register.island = "lyon"
    await asyncio.gather(a.connect(head.address), b.connect(head.address))
    job = await head.submit((2, 2))
    await head.phase(job, pb.PHASE_RUNNING)
    text = "one island with all the data would be sooner: here alone takes 0.05 s for a step of 64 samples, "
    text += "all 2 islands together 0.1 s"
    at = 0

    async def train() -> list[str]:
        nonlocal at
        for agent, rank in ((a, 0), (b, 1)):
            await agent.train((job, 1, rank), range(at, at + 20), local=32, total=64, compute_s=0.02, plan=1)
        at += 20
        await asyncio.sleep(0.1)  # profiles come now and then: as fast as they can, steps only heat the processor
        while (await head.get(job)).progress.step < at - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return await head.events(job)

    async with asyncio.timeout(300):
        while text not in await train():
            pass
        assert (await head.get(job)).reason == f"run 1: 2 workers training; {text}"
        told_s = time.monotonic()
        while time.monotonic() < told_s + 3 * PROFILE_EVERY_S:
            said = await train()
    assert said.count(text) == 1
    assert not [line for line in said if "one island" in line and line != text]
    await asyncio.gather(a.disconnect(), b.disconnect())
