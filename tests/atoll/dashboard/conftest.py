"""`atoll dashboard` as a process of its own, before a controller whose state the test writes; a real browser."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from scripted_controller import ScriptedController

sys.path.insert(0, str(Path(__file__).parent))

from opened import Dashboard

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

expect.set_options(timeout=30_000)  # on a machine that does other things as well
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def busy(controller: ScriptedController) -> ScriptedController:
    """Two islands, a job of 64 workers on them, and one that is over."""
    script = controller.script
    script.nodes.CopyFrom(
        pb.ListNodesReply(
            controller=controller.address,
            version="0.1.0",
            unix_s=1.7e9 + 60,
            nodes=[
                pb.Node(
                    name=f"n{at}",
                    island=("east", "west")[at % 2],
                    connected=at != 3,
                    devices=[common.Device(kind="cuda", model="RTX 3090")],
                )
                for at in range(8)
            ],
        )
    )
    workers = [
        pb.WorkerView(
            rank=rank,
            node=f"n{rank % 8}",
            device=rank // 8,
            share=1 / 64,
            status=common.WorkerStatus(state=common.WORKER_STATE_RUNNING, pid=1000 + rank, uses_atoll=True),
            last=common.StepSample(step=40, local_batch=4, total_batch=256, step_s=0.1, compute_s=0.08, wait_s=0.02),
            links=[common.LinkSample(peer=(rank + 1) % 64, goodput_bps=94e6, sent_bytes=2**20)] if rank < 2 else [],
        )
        for rank in range(64)
    ]
    script.add("vit-1", workers=workers, progress=pb.Progress(step=40, metrics={"loss": 0.5}), reason="64 train")
    script.add("<b>old</b>", pb.PHASE_FAILED, ended_unix_s=1.7e9 + 30, reason="<script>alert(1)</script>")
    return controller


@pytest.fixture
def dashboard(controller: ScriptedController) -> Iterator[Dashboard]:
    with Dashboard(controller.address) as started:
        yield started


@pytest.fixture
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: the page was NOT tested in a browser (apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """A page that was let in; in the end no script of it must have failed."""
    opened = browser.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("dialog", lambda dialog: dialog.accept())
    opened.goto(dashboard.address)
    yield opened
    opened.close()
    assert errors == []
