from __future__ import annotations

from atoll.agent.runtime.strategy_interface.capabilities import Pass, WorkerContext, WorkerHalf
from atoll.strategies.declaration import Declared
from atoll.strategies.dense.worker import DenseReducer
from atoll.strategies.toy.plan import ToyMessage, ToyPlan
from atoll.strategies.toy.settings import Toy


def build(context: WorkerContext) -> WorkerHalf:
    reducer = ToyReducer(context)
    return WorkerHalf(reducer, measures=reducer)


class ToyReducer(DenseReducer):
    """A TensorReducer and its Measures: what `dense` does, and a word with its scheduler."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context.session.group)
        assert isinstance(context.settings, Toy)
        self._strength = context.settings.strength
        self._rank, self._scheduler = context.session.place.rank, context.scheduler
        self._scheduler.listen(self._heard)

    def begin(self, opened: Pass) -> None:
        if isinstance(opened.params, ToyPlan) and opened.params.strength is not None:
            self._strength = opened.params.strength
        if opened.batch.step == 0:
            self._scheduler.tell(ToyMessage(question=self._rank + 20))

    def take_step(self, stall_s: float, sent_bytes: int) -> dict[str, float]:
        return {"toy_strength": self._strength, "toy_s": 0.001}

    def statistics(self) -> dict[str, float]:
        return {}

    def _heard(self, message: Declared) -> None:
        assert isinstance(message, ToyMessage)
        print(f"rank {self._rank} was answered {message.answer}", flush=True)
