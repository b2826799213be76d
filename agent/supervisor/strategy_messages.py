"""Messages of strategies on their way from this node's workers to the controller: sent as they come, lost where it is
away."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from atoll.v1.common_pb2 import StrategyMessage

MAX_WAITING: Final = 1024
"""The oldest are dropped first: a scheduler asks for what is, not for what was."""


class StrategyMessages:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._waiting: deque[StrategyMessage] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()

    def put(self, message: StrategyMessage) -> None:
        self._waiting.append(message)
        self._filled.set()

    def clear(self) -> None:
        """Nobody was there to take them."""
        self._waiting.clear()

    async def next(self) -> StrategyMessage:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()
