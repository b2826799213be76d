"""The worker half's line to the controller half of its strategy: typed messages, answered within milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.errors import BadInput
from atoll.strategies.declaration import Declared, Strategy, as_json, read
from atoll.v1.common_pb2 import LEVEL_WARNING


class StrategyChannel:
    """Nothing arrives, and nothing is heard, where there is no agent or no controller: a strategy goes on without."""

    def __init__(self, link: AgentLink | None, strategy: Strategy) -> None:
        self._link, self._strategy = link, strategy

    @property
    def answers(self) -> bool:
        """Return True if there can be a controller half."""
        return self._link is not None

    def tell(self, message: Declared) -> None:
        """Send a message of the type that the strategy registered. From any thread."""
        if self._link is not None:
            self._link.tell_strategy(as_json(message.said()))

    def listen(self, heard: Callable[[Declared], None]) -> None:
        """Have `heard` called with each message, on the link's thread: it must not wait."""
        if self._link is not None:
            self._link.on_strategy = lambda body: self._hear(body, heard)

    def _hear(self, body: str, heard: Callable[[Declared], None]) -> None:
        assert self._link is not None
        if self._strategy.message is None:
            return
        try:
            message = read(self._strategy.message, body, f"message of strategy {self._strategy.name}")
        except BadInput as error:
            self._link.outbox.notice(LEVEL_WARNING, f"rank {self._link.id.rank} dropped a message: {error}")
        else:
            heard(message)
