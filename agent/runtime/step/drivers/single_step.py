"""Driver of a run of one worker: torch's own backward pass and optimizer.step(), with nothing to exchange."""

from __future__ import annotations

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import AloneReducer, Norms, WorkerHalf


class SingleStep(StepDriver):
    combines = False

    def __init__(self, parts: StepParts, half: WorkerHalf, coordination: Coordination) -> None:
        super().__init__(parts, half, coordination)
        self._reducer = half.capability if isinstance(half.capability, AloneReducer) else None

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        if self._reducer is not None:
            self._reducer.start_alone(origin)

    def end_pass(self) -> Norms:
        self.coordination.act()
        return Norms()

    def release(self, *, followed: bool) -> None:
        if self._reducer is not None:
            self._reducer.close()
