"""Queue of strategies' messages from this node's workers to the controller. Cleared while that is away."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from atoll.v1.common_pb2 import StrategyMessage

MAX_WAITING: Final = 1024
"""Length of the queue; the oldest are dropped first, since a scheduler needs only the newest state."""


class StrategyMessages:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._waiting: deque[StrategyMessage] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()

    def put(self, message: StrategyMessage) -> None:
        self._waiting.append(message)
        self._filled.set()

    def clear(self) -> None:
        """Drop all messages: the controller is away."""
        self._waiting.clear()

    async def next(self) -> StrategyMessage:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()
