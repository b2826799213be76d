"""The page in a real browser: every view, a wide job, many events, and a controller that goes away under it."""

from __future__ import annotations

from opened import Dashboard
from playwright.sync_api import Page, expect
from scripted_controller import ScriptedController

from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb


def test_every_view_of_a_wide_job(busy: ScriptedController, dashboard: Dashboard, page: Page) -> None:
    """1. Jobs and nodes; names of jobs are text, whatever they hold. 2. Its 64 workers, and a step later the same rows
    tell it. 3. Curves, drawn over what is finite. 4. Plans with reasons. 5. Logs, of one rank where
    asked. 6. The map."""
    script = busy.script
    expect(page.get_by_role("link", name="vit-1")).to_be_visible()
    expect(page.locator("td", has_text="<script>alert(1)</script>")).to_be_visible()
    expect(page.locator("td.lost")).to_have_text("lost")
    assert "token" not in page.url
    page.get_by_role("link", name="vit-1").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("vit-1 running")
    rows = page.get_by_role("region", name="Workers").locator("tbody tr")
    expect(rows).to_have_count(64)
    expect(rows.first).to_contain_text("80 %")
    script.change("vit-1", progress=pb.Progress(step=41, metrics={"loss": 0.25}))
    expect(page.locator(".lines")).to_contain_text("step 41  epoch 0  loss 0.25")

    script.curves["loss"] = pb.Curve(
        name="loss", steps=[0, 1, 2, 3], values=[2, float("nan"), 1, 0.5], runs=[1] * 4, unix_s=[1.7e9] * 4
    )
    page.get_by_role("link", name="curves").click()
    figure = page.get_by_role("img", name="loss over steps 0 to 3: from 2 to 0.5, least 0.5, most 2")
    expect(figure).to_be_visible()
    assert (figure.locator("path").get_attribute("d") or "").count("M") == 2

    plan = common.Plan(id=7, planner="inverse-time", reason="n3 is slower", from_step=10)
    script.plans.CopyFrom(pb.PlansReply(plans=[pb.DecidedPlan(plan=plan)]))
    page.get_by_role("link", name="plans").click()
    expect(page.locator("tbody tr")).to_contain_text(["n3 is slower"])

    script.write(b"hello of zero\n", rank=0)
    script.write(b"hello of one\n", rank=1)
    page.get_by_role("link", name="logs").click()
    expect(page.locator("pre")).to_contain_text("[1] hello of one")
    page.get_by_label("Rank").fill("0")
    page.get_by_label("Rank").press("Tab")
    expect(page.locator("pre")).to_have_text("[0] hello of zero")

    page.get_by_role("link", name="Map").click()
    expect(page.locator("svg text", has_text="east → west 94.0 Mbit/s")).to_be_visible()
    expect(page.locator("svg circle.node-lost")).to_have_count(1)


def test_on_a_phone_nothing_lies_beside_the_screen(busy: ScriptedController, page: Page) -> None:
    """Reasons stood to the right of what a phone shows. Rows are laid out below each other there, with the columns'
    names, and are rows and cells to a screen reader still."""
    width = 390
    page.set_viewport_size({"width": width, "height": 800})
    busy.script.change(
        "vit-1", reason="so that the row is wide " * 8, progress=pb.Progress(step=41, trained_share=0.25)
    )
    outside = (
        "cells => cells.filter(cell => cell.getBoundingClientRect().right > innerWidth).map(cell => cell.textContent)"
    )
    expect(page.get_by_role("cell", name="so that the row is wide")).to_be_visible()
    assert page.locator("td").evaluate_all(outside) == []
    page.get_by_role("link", name="vit-1").press("Enter")
    expect(page.get_by_role("region", name="Workers").get_by_role("row")).to_have_count(65)
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "0.25")
    assert page.locator("td").evaluate_all(outside) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_phone_shows_drawings_that_can_be_read_and_logs_that_wrap(busy: ScriptedController, page: Page) -> None:
    """The map's letters were a third of their size; the ends of lines lay beside the screen."""
    page.set_viewport_size({"width": 390, "height": 844})
    scale = "drawn => drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width"
    page.get_by_role("link", name="Map").click()
    drawn = page.get_by_role("img", name="Map of islands")
    expect(drawn.get_by_text("east → west 94.0 Mbit/s")).to_be_visible()
    assert drawn.evaluate(scale) > 0.9
    letters = "drawn => [...drawn.querySelectorAll('text')].map(text => text.getBoundingClientRect())"
    assert all(box["left"] >= 0 and box["right"] <= 390 for box in drawn.evaluate(letters))
    busy.script.curves["loss"] = pb.Curve(name="loss", steps=[0, 1], values=[2, 1], runs=[1, 1], unix_s=[1.7e9] * 2)
    page.get_by_role("link", name="Cluster").click()
    page.get_by_role("link", name="vit-1").click()
    page.get_by_role("link", name="curves").click()
    assert page.get_by_role("img", name="loss over steps").evaluate(scale) > 0.9
    busy.script.write(b"a long line " * 40 + b"\n", rank=0)
    page.get_by_role("link", name="logs").click()
    expect(page.locator("pre")).to_contain_text("a long line")
    assert page.locator("pre").evaluate("shown => shown.scrollWidth <= shown.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_ten_thousand_events(controller: ScriptedController, page: Page) -> None:
    """The newest 500 first, older ones when asked for, a new one on top without a reload."""
    stored = [
        common.Event(
            sequence=1 + at, unix_s=1.7e9, level=common.LEVEL_INFO, kind=common.EVENT_KIND_NODE, text=f"number {1 + at}"
        )
        for at in range(10_000)
    ]
    controller.script.events.extend(stored)
    page.get_by_role("link", name="Events").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(500)
    expect(rows.first).to_contain_text("number 10000")
    page.get_by_role("button", name="Show older ones (9500)").click()
    expect(rows).to_have_count(1000)
    expect(rows.last).to_contain_text("number 9001")
    controller.script.events.append(
        common.Event(sequence=10_001, unix_s=1.7e9, kind=common.EVENT_KIND_NODE, text="the newest")
    )
    expect(rows.first).to_contain_text("the newest")
    expect(rows).to_have_count(1001)


def test_it_says_that_the_controller_is_gone_and_goes_on_when_it_is_back(busy: ScriptedController, page: Page) -> None:
    page.get_by_role("link", name="vit-1").click()
    expect(page.locator(".lines")).to_contain_text("step 40")
    busy.kill()
    trouble = page.get_by_role("alert")
    expect(trouble).to_contain_text(busy.address)
    busy.script.change("vit-1", progress=pb.Progress(step=77))
    busy.start()
    expect(page.locator(".lines")).to_contain_text("step 77")
    expect(trouble).to_be_hidden()


def test_a_job_is_cancelled_and_adjusted_from_the_page(busy: ScriptedController, page: Page) -> None:
    """1. What the controller refuses is told in its words. 2. A job that is cancelled says so, and there is nothing
    left to ask for once it has ended."""
    page.get_by_role("link", name="vit-1").click()
    page.get_by_label("Samples of a step").fill("128")
    page.get_by_role("button", name="Pin it").click()
    expect(page.get_by_role("status")).to_contain_text("has no sparsity")
    page.get_by_role("button", name="Cancel this job").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("vit-1 stopping")
    busy.script.change("vit-1", phase=pb.PHASE_CANCELLED, ended_unix_s=1.7e9 + 50)
    expect(page.get_by_role("heading", level=1)).to_have_text("vit-1 cancelled")
    expect(page.get_by_role("button", name="Cancel this job")).to_be_hidden()
