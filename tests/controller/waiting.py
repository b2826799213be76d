"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not holds():  # noqa: ASYNC110 - nothing here tells of it
            await asyncio.sleep(0.02)
