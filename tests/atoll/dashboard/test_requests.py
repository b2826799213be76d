"""What the dashboard answers, and to whom, without a browser."""

from __future__ import annotations

import json
import socket

import pytest
from opened import Dashboard
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.dashboard import pages
from atoll.v1 import jobs_pb2 as pb


def test_nobody_comes_in_without_the_token_or_by_a_foreign_name(busy: ScriptedController, dashboard: Dashboard) -> None:
    """1. A page without the cookie, or with another one, is refused, and so are questions and wishes. 2. A name that
    another site lets resolve to this machine is refused, also with the cookie. 3. Who is let in gets old events in
    pages."""
    for path in ("/", "/?token=wrong", "/assets/app.js", "/api/events", "/api/stream"):
        assert dashboard.ask(path, cookie="wrong")[0] == 401, path
    assert dashboard.ask("/api/jobs/vit-1/cancel", b"{}", cookie="")[0] == 401
    assert busy.script.jobs["vit-1"].phase == pb.PHASE_RUNNING
    assert dashboard.ask("/", host="evil.example:80")[0] == 421
    status, text = dashboard.ask("/")
    assert (status, "<!doctype html>" in text) == (200, True)
    for number in range(1200):
        busy.script.happened("", "NODE", f"number {number + 1}")
    newest = dashboard.ask("/api/events")[1]
    assert [newest["events"][at]["sequence"] for at in (0, -1)] == [701, 1200]
    assert newest["earlier"] == 700
    older = dashboard.ask("/api/events?before=201")[1]
    assert [len(older["events"]), older["earlier"]] == [200, 0]


def test_wrong_questions_get_one_line(busy: ScriptedController, dashboard: Dashboard) -> None:
    """Statuses by kind of error; a word of the cause; nothing was changed."""
    cases = {
        "/api/jobs/none/curves": (404, "no job 'none'"),
        "/api/jobs/vit-1/logs?rank=x": (400, "rank 'x' must be a whole number"),
        "/api/jobs/vit-1/events?before=99999999999999999999": (400, "must be a whole number"),
    }
    for path, (status, words) in cases.items():
        answered, told = dashboard.ask(path)
        assert (answered, words in told["error"]) == (status, True), told
    wishes: dict[bytes, str] = {
        b"[]": "no JSON object",
        b"{": "no JSON",
        b'{"total_batch": -1}': "at least 1",
        b'{"unpin": "shares"}': "list of names",
        b" " * 70_000: "over 65536 bytes",
    }
    for body, words in wishes.items():
        answered, told = dashboard.ask("/api/jobs/vit-1/adjust", body)
        assert (answered, words in told["error"]) == (400, True), told
    assert "Adjust" not in busy.script.calls
    answered, told = dashboard.ask("/api/jobs/vit-1/adjust", b'{"total_batch": 64}')
    assert (answered, "has no sparsity" in told["error"]) == (409, True), told
    busy.kill()
    answered, told = dashboard.ask("/api/jobs/vit-1/plans")
    assert (answered, busy.address in told["error"]) == (503, True), told


def test_the_map_joins_what_workers_measured_between_islands(busy: ScriptedController) -> None:
    """Ranks 0 (n0, east) and 1 (n1, west) measured 94 Mbit/s to the other island; links inside one are left out."""
    jobs = [busy.script.jobs["vit-1"]]
    jobs[0].workers[2].links.add(peer=0, goodput_bps=1e9)  # n2 to n0: both east
    jobs[0].workers[4].links.add(peer=99, goodput_bps=1e9)  # to nobody that is known
    found = pages.islands(jobs, busy.script.nodes.nodes)
    assert found["links"] == [
        {"from": "east", "to": "west", "goodput_bps": 94e6, "sent_bytes": 2**20, "relayed": False},
        {"from": "west", "to": "east", "goodput_bps": 94e6, "sent_bytes": 2**20, "relayed": False},
    ]
    assert [(island["name"], len(island["nodes"])) for island in found["islands"]] == [("east", 4), ("west", 4)]
    jobs[0].workers[0].behind_nat = True
    links = pages.islands(jobs, busy.script.nodes.nodes)["links"]
    assert [link["relayed"] for link in links] == [True, False]  # rank 1 measured the way to rank 2 alone
    assert json.dumps(pages.cluster(jobs, busy.script.nodes), allow_nan=False)


@pytest.mark.parametrize(
    ("listen", "words"),
    [("0.0.0.0:8265", "on this machine alone"), ("127.0.0.1:x", "HOST:PORT"), ("127.0.0.1:99999", "0 to 65535")],
)
def test_an_address_that_others_reach_is_refused(runner: CliRunner, listen: str, words: str) -> None:
    done = runner.invoke(app, ["dashboard", "--listen", listen])
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_port_in_use_is_told(runner: CliRunner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        done = runner.invoke(app, ["dashboard", "--listen", f"127.0.0.1:{held.getsockname()[1]}"])
    assert (done.exit_code, "Choose another port" in done.stderr) == (2, True), done.stderr
