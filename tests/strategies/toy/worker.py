from __future__ import annotations

import torch
from torch import nn

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.synchronisation import Callbacks, Pass, StepNumbers
from atoll.strategies.declaration import Declared
from atoll.strategies.dense.worker import DenseSynchroniser
from atoll.strategies.toy import STRATEGY
from atoll.strategies.toy.plan import ToyMessage, ToyPlan
from atoll.strategies.toy.settings import Toy


def build(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, agreed: Agreed
) -> ToySynchroniser:
    return ToySynchroniser(session, model, callbacks, agreed)


class ToySynchroniser(DenseSynchroniser):
    def __init__(self, session: Session, model: nn.Module, callbacks: Callbacks, agreed: Agreed) -> None:
        assert session.group is not None
        assert isinstance(session.strategy, Toy)
        super().__init__(model, session.group, callbacks, agreed)
        self._strength = session.strategy.strength
        self._channel = StrategyChannel(session.link, STRATEGY)
        self._channel.listen(self._heard)
        self._rank = session.place.rank

    def begin(self, opened: Pass) -> None:
        super().begin(opened)
        if isinstance(opened.params, ToyPlan) and opened.params.strength is not None:
            self._strength = opened.params.strength
        if opened.batch_slice.step == 0:
            self._channel.tell(ToyMessage(question=self._rank + 20))

    def step_numbers(self) -> StepNumbers:
        numbers = super().step_numbers()
        metrics = {"toy_strength": self._strength, "toy_s": 0.001}
        return StepNumbers(sync_s=numbers.sync_s, last_sync_s=numbers.last_sync_s, metrics=metrics)

    def _heard(self, message: Declared) -> None:
        assert isinstance(message, ToyMessage)
        print(f"rank {self._rank} was answered {message.answer}", flush=True)
