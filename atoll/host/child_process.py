"""Ends a child process of the controller."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

logger = logging.getLogger(__name__)


async def end(child: asyncio.subprocess.Process, name: str, within_s: float) -> None:
    """SIGTERM, and SIGKILL where that does not do within so long. It is gone when this returns."""
    if child.returncode is not None:
        return
    with suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(within_s):
            await child.wait()
    except TimeoutError:
        logger.warning("%s did not end within %.0f s of SIGTERM; killing it", name, within_s)
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
