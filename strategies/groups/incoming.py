"""Routes what comes from other workers: to the averages' mailbox, to the claims, or to the pipeline's."""

from __future__ import annotations

from atoll.agent.runtime.pipeline.wire import FIRST_PURPOSE, StageMailbox
from atoll.strategies.groups.claims import CLAIM, Claims
from atoll.strategies.groups.mailbox import PartMailbox
from atoll.strategies.groups.signals import Signals


class Incoming:
    """A FrameReceiver of all of them."""

    def __init__(self, parts: PartMailbox, claims: Claims, signals: Signals, stages: StageMailbox) -> None:
        self._parts, self._claims, self._signals, self._stages = parts, claims, signals, stages

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        first = payload[0] if len(payload) else 0
        if first == CLAIM:
            return self._claims.deliver(origin, step, payload)
        receiver = self._stages if first >= FIRST_PURPOSE else self._parts
        return receiver.deliver(kind, origin, step, tensor, count, payload)

    def fail(self, reason: str) -> None:
        for one in (self._parts, self._claims, self._signals, self._stages):
            one.fail(reason)
