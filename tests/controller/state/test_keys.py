"""The layout of keys: what architecture.md promises, in an order that is the order of numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.controller.state import keys
from atoll.errors import BadInput

SHA = "0123456789abcdef" * 4


def test_keys_are_those_that_the_architecture_names() -> None:
    assert keys.LEADER == "/atoll/leader"
    assert keys.job("j1") == "/atoll/jobs/j1"
    assert keys.run("j1", 7) == "/atoll/runs/j1/000007"
    assert keys.plan("j1", 7, 12) == "/atoll/plans/j1/000007/000012"
    assert keys.placement("j1", 3) == "/atoll/placements/j1/000003"
    assert keys.admission("j1", 3) == "/atoll/admissions/j1/000003"
    assert keys.node("gpu-1.lab") == "/atoll/nodes/gpu-1.lab"
    assert keys.event(keys.CLUSTER, 1234) == "/atoll/events/_cluster/00001234"
    assert keys.code(SHA, 3) == f"/atoll/code/{SHA}/0003"
    assert keys.request("r-1") == "/atoll/requests/r-1"


def test_every_key_lies_under_its_prefix_and_under_no_other_jobs() -> None:
    for key, prefix in (
        (keys.job("j1"), keys.JOBS),
        (keys.run("j1", 1), keys.runs_prefix("j1")),
        (keys.plan("j1", 1, 1), keys.plans_prefix("j1", 1)),
        (keys.plans_prefix("j1", 1), keys.plans_prefix("j1")),
        (keys.placement("j1", 1), keys.placements_prefix("j1")),
        (keys.admission("j1", 1), keys.admissions_prefix("j1")),
        (keys.node("n"), keys.NODES),
        (keys.event("j1", 1), keys.events_prefix("j1")),
        (keys.code(SHA, 1), keys.code_prefix(SHA)),
        (keys.request("r"), "/atoll/requests/"),
    ):
        assert key.startswith(prefix)
        assert prefix.endswith("/")
    assert not keys.run("j10", 1).startswith(keys.runs_prefix("j1"))


def test_the_manual_lists_every_key() -> None:
    text = (Path(__file__).parents[3] / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| `(/atoll/[^`]+)` \|", text, re.MULTILINE)
    n, job = "N" * 6, "ID"
    assert listed == [
        keys.LEADER,
        keys.job(job),
        f"{keys.runs_prefix(job)}{n}",
        f"{keys.plans_prefix(job)}{n}/{n}",
        f"{keys.placements_prefix(job)}{n}",
        keys.commit(job),
        f"{keys.admissions_prefix(job)}{n}",
        keys.node("NAME"),
        f"{keys.events_prefix(job)}{'N' * 8}",
        f"{keys.code_prefix(SHA).replace(SHA, 'SHA256')}NNNN",
        keys.request("REQUEST_ID"),
    ]


def test_order_of_keys_is_order_of_numbers() -> None:
    numbers = [0, 1, 9, 10, 99, 100, 999_999]
    assert sorted(keys.run("j", n) for n in numbers) == [keys.run("j", n) for n in numbers]
    assert [int(keys.last_segment(keys.run("j", n))) for n in numbers] == numbers


@pytest.mark.parametrize("name", ["", "a/b", "../leader", "a b", "a\n", "é", ".", "x" * 254])
@pytest.mark.parametrize("key", [keys.job, keys.node, keys.request, keys.runs_prefix, keys.events_prefix])
def test_names_that_would_reach_other_keys_are_refused(key: Callable[[str], str], name: str) -> None:
    with pytest.raises(BadInput, match="cannot be part of a key"):
        key(name)


def test_numbers_and_hashes_that_do_not_fit_are_refused() -> None:
    for make in (
        lambda: keys.run("j", 1_000_000),
        lambda: keys.run("j", -1),
        lambda: keys.code(SHA, 10_000),
        lambda: keys.code(SHA.upper(), 0),
        lambda: keys.code("", 0),
    ):
        with pytest.raises(BadInput):
            make()
