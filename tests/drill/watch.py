"""Follows the controllers during a drill: who leads, and the job's events with their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from atoll.client.client import AsyncClient
from atoll.errors import ControllerUnreachable
from atoll.v1 import common_pb2 as common
from drill.figures import Noticed
from drill.schedule import Hit, Strike

_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 1.0
_LEADERLESS_S: Final = 60.0


class Watch:
    """Of one job. Run `lead` and `follow` as tasks."""

    def __init__(self, controllers: Mapping[str, str]) -> None:
        """controllers: address by name."""
        self._names = {address: name for name, address in controllers.items()}
        self.leader: str | None = None
        self.led: list[tuple[float, str]] = []
        """(wall clock, name): another controller answered as the one that leads."""
        self.events: dict[int, common.Event] = {}
        """By their number."""

    async def lead(self) -> None:
        """Ask again and again who leads, until cancelled."""
        async with AsyncClient(list(self._names), timeout_s=_PATIENCE_S) as client:
            while True:
                with suppress(ControllerUnreachable):
                    leader = self._names[(await client.nodes()).controller]
                    if leader != self.leader:
                        self.leader = leader
                        self.led.append((time.time(), leader))
                await asyncio.sleep(_LOOK_S)

    async def follow(self, job: str) -> None:
        """Collect the job's events until it has ended. Raises ControllerUnreachable after a minute without a leader."""
        async with AsyncClient(list(self._names), timeout_s=_LEADERLESS_S) as client:
            async for event in client.events(job, follow=True):
                self.events[event.sequence] = event

    def noticed(self, hit: Hit) -> Noticed:
        """When a controller said that a worker was lost, or when another controller led."""
        if hit.strike in (Strike.LEADER, Strike.LEADER_STOP):
            led = (at_s for at_s, name in self.led if at_s > hit.at_s and name not in hit.victims)
            return Noticed(hit, next(led, None))
        if not hit.strike.takes_workers:
            return Noticed(hit, None)
        after = (event for event in self.in_order() if event.unix_s > hit.at_s)
        return Noticed(
            hit, next((event.unix_s for event in after if event.kind == common.EVENT_KIND_WORKER_ENDED), None)
        )

    def in_order(self) -> list[common.Event]:
        """The job's events, each after those before it."""
        return [event for _, event in sorted(self.events.items())]
