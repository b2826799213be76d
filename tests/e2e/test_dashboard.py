"""The page before a real cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from playwright.sync_api import expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SLOW_MS = 60_000


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page was NOT tested before a real cluster")
def test_a_job_is_watched_and_cancelled_in_a_browser_over_a_restart_of_its_controller(
    cluster: Cluster, tmp_path: Path
) -> None:
    """1. A job trains on two machines; its page tells its steps, and draws its loss. 2. The controller is killed: the
    page says so. 3. Once it is back, the same page goes on. 4. The job is cancelled there."""
    cluster.local([1.0, 1.0])
    job = cluster.submit("tiny.py", f"--out={tmp_path / 'out'}", "--step-s=0.1", "--epochs=100", workers=(2, 2))
    command = (sys.executable, "-m", "atoll.cli.main", "--controller", cluster.addresses[0], "dashboard")
    served = subprocess.Popen((*command, "--listen", "127.0.0.1:0"), stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(served.stdout.readline().strip())
            page.get_by_role("link", name=job).click()
            expect(page.get_by_role("region", name="Workers").locator("td.running")).to_have_count(2, timeout=SLOW_MS)
            expect(page.locator(".lines")).to_contain_text("samples/s", timeout=SLOW_MS)
            page.get_by_role("link", name="curves").click()
            expect(page.get_by_role("img")).to_be_visible(timeout=SLOW_MS)
            page.get_by_role("link", name="overview").click()
            cluster.kill("controller")
            expect(page.get_by_role("alert")).to_be_visible(timeout=SLOW_MS)
            cluster.restart("controller")
            expect(page.get_by_role("alert")).to_be_hidden(timeout=SLOW_MS)
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_role("button", name="Cancel this job").click()
            expect(page.get_by_role("heading", level=1)).to_have_text(f"{job} cancelled", timeout=SLOW_MS)
            browser.close()
    finally:
        served.terminate()
        assert served.wait(30) == 0
        if served.stdout is not None:
            served.stdout.close()
