"""When a volunteer's machine helps, by its owner's hours and command."""

from __future__ import annotations

import asyncio
from datetime import time
from pathlib import Path

import pytest

from atoll.agent.supervisor.owner import Hours, OwnersLimits
from atoll.errors import SettingError


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("09:00-17:30", [time(9), time(17, 29)], [time(8, 59), time(17, 30), time(0)]),
        ("22:00-7:00", [time(22), time(23, 59), time(0), time(6, 59)], [time(7), time(21, 59)]),
        ("18:00-24:00", [time(18), time(23, 59)], [time(0), time(17, 59)]),
    ],
)
def test_hours_are_a_part_of_each_day(text: str, inside: list[time], outside: list[time]) -> None:
    hours = Hours.parse(text)
    assert [now for now in inside + outside if hours.has(now)] == inside


@pytest.mark.parametrize("text", ["", "22-7", "25:00-07:00", "22:00-22:00", "22:00-24:01", "-22:00-07:00"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="22:00-07:00"):
        Hours.parse(text)


async def test_it_rests_while_the_owners_command_succeeds(tmp_path: Path) -> None:
    limits = OwnersLimits(pause=f"test -e {tmp_path}/owner")
    assert await limits.why_to_rest() is None
    resting = asyncio.create_task(limits.until_rest())
    (tmp_path / "owner").touch()
    assert "its owner needs it" in await asyncio.wait_for(resting, 30)
    stop = asyncio.Event()
    helping = asyncio.create_task(limits.until_help(stop))
    (tmp_path / "owner").unlink()
    await asyncio.wait_for(helping, 30)


async def test_without_limits_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of nobody in particular woke up every 2 s."""

    async def looked(self: OwnersLimits) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(OwnersLimits, "why_to_rest", looked)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(OwnersLimits().until_rest(), 0.05)


async def test_who_waits_for_the_owner_ends_when_asked(tmp_path: Path) -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(OwnersLimits(pause="true").until_help(stop))
    stop.set()
    await asyncio.wait_for(waiting, 30)


async def test_outside_all_hours_it_rests_and_says_when_it_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    none_now = (Hours.parse("00:00-00:01"), Hours.parse("00:01-00:02"))
    monkeypatch.setattr(Hours, "has", lambda self, now: False)
    assert await OwnersLimits(hours=none_now).why_to_rest() == "its owner lends it 00:00-00:01 and 00:01-00:02"
