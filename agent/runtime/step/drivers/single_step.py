"""Driver of a run of one worker: torch's own backward pass and optimizer.step(), with nothing to exchange."""

from __future__ import annotations

from atoll.agent.runtime.channel.channel import LINGER_S
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.backward.half_batches import half_batches_of
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import AloneReducer, Norms, Pass, WorkerHalf


class SingleStep(StepDriver):
    combines = False

    def __init__(self, parts: StepParts, half: WorkerHalf, coordination: Coordination) -> None:
        super().__init__(parts, half, coordination)
        self._reducer = half.capability if isinstance(half.capability, AloneReducer) else None
        self._halves = half_batches_of(parts.session, parts.model, parts.loader)

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        if self._reducer is not None:
            self._reducer.start_alone(origin)

    def begin_pass(self, opened: Pass) -> None:
        self.coordination.begin_pass(opened, self.parts.own())

    def end_pass(self) -> Norms:
        self.coordination.act()
        return self._halves.take() if self._halves is not None else Norms()

    def close(self, *, followed: bool = False) -> None:
        if self._halves is not None:
            self._halves.close()
        if self._reducer is not None:
            self._reducer.close()
        self.coordination.channel.close(linger_s=0.0 if followed else LINGER_S)
