"""Routes what comes from other workers: to the averages' mailbox, or to the pipeline's."""

from __future__ import annotations

from atoll.agent.runtime.pipeline.wire import FIRST_PURPOSE, StageMailbox
from atoll.strategies.groups.mailbox import PartMailbox


class Incoming:
    """A FrameReceiver of both."""

    def __init__(self, parts: PartMailbox, stages: StageMailbox) -> None:
        self._parts, self._stages = parts, stages

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        of_stages = len(payload) > 0 and payload[0] >= FIRST_PURPOSE
        receiver = self._stages if of_stages else self._parts
        return receiver.deliver(kind, origin, step, tensor, count, payload)

    def fail(self, reason: str) -> None:
        self._parts.fail(reason)
        self._stages.fail(reason)
