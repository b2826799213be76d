"""Limits that a volunteer's owner sets: when the machine helps, and what for."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time
from typing import Final

from atoll.errors import SettingError

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0  # how often the clock and the command are asked
COMMAND_S: Final = 5.0  # a command that takes longer says nothing

_HOURS: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Hours:
    """Daily interval of time, over midnight if its end is earlier than its begin."""

    begin_min: int
    end_min: int

    @staticmethod
    def parse(text: str) -> Hours:
        """'22:00-07:00'. Raises SettingError."""
        found = _HOURS.fullmatch(text)
        minutes = [60 * int(found[at]) + int(found[at + 1]) for at in (1, 3)] if found is not None else [0, 0]
        if minutes[0] == minutes[1] or minutes[1] > 24 * 60:
            raise SettingError("hours", text, "is no part of a day", "Give two times, as in 22:00-07:00")
        return Hours(*minutes)

    def has(self, now: time) -> bool:
        at = 60 * now.hour + now.minute
        if self.begin_min < self.end_min:
            return self.begin_min <= at < self.end_min
        return at >= self.begin_min or at < self.end_min

    def __str__(self) -> str:
        return "-".join(f"{minutes // 60:02}:{minutes % 60:02}" for minutes in (self.begin_min, self.end_min))


@dataclass(frozen=True, slots=True)
class OwnersLimits:
    """Conditions under which a machine helps. Without any: always."""

    hours: tuple[Hours, ...] = ()
    """Daily intervals by the machine's own clock. Empty: all day."""

    pause: str = ""
    """A shell's command: while it succeeds, the owner needs the machine."""

    async def why_to_rest(self) -> str | None:
        """None: the machine may help now."""
        if self.hours and not any(one.has(datetime.now().astimezone().time()) for one in self.hours):
            return f"its owner lends it {_listed(self.hours)}"
        if self.pause and await _succeeds(self.pause):
            return f"its owner needs it: `{self.pause}` succeeds"
        return None

    async def until_rest(self) -> str:
        """Waits until the machine is to rest. Returns why."""
        never = asyncio.Event()
        if not self.hours and not self.pause:
            await never.wait()
        while (why := await self.why_to_rest()) is None:
            await _pass_time(never)
        return why

    async def until_help(self, stop: asyncio.Event) -> None:
        """Waits until the machine may help, or `stop`."""
        told = None
        while not stop.is_set() and (why := await self.why_to_rest()) is not None:
            if why != told:
                logger.info("rests: %s", why)
                told = why
            await _pass_time(stop)


async def _pass_time(stop: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), LOOK_S)


def _listed(hours: Iterable[Hours]) -> str:
    return " and ".join(map(str, hours))


async def _succeeds(command: str) -> bool:
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_shell(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        return await asyncio.wait_for(process.wait(), COMMAND_S) == 0
    except TimeoutError:
        logger.warning("`%s` takes longer than %.0f s, and counts for nothing", command, COMMAND_S)
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
