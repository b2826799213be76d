"""Driver of an Engine, which makes whole steps in place of the script's passes and updates."""

from __future__ import annotations

from typing import Any

import torch

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import Engine, Norms, WorkerHalf


class EngineStep(StepDriver):
    def __init__(self, parts: StepParts, half: WorkerHalf, coordination: Coordination, engine: Engine) -> None:
        super().__init__(parts, half, coordination)
        self.engine: Engine = engine

    @property
    def why_not_in_place(self) -> str | None:
        return self.engine.why_not_in_place

    @property
    def tolerates_loss_mid_step(self) -> bool:
        return self.engine.tolerates_loss_mid_step

    @property
    def step_is_atomic(self) -> bool:
        return self.engine.why_not_in_place is None

    @property
    def lost(self) -> str | None:
        return self.engine.lost

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        self.engine.start()

    def end_pass(self) -> Norms:
        self.coordination.act()
        return Norms()

    def step(self, batch: Any) -> torch.Tensor:
        taken = self.parts.loader.current
        assert taken is not None  # begin_backward refuses otherwise
        return self.engine.step(batch, taken)

    def rewind(self, step: int) -> bool:
        return self.engine.rewind(step)

    def after_update(self) -> None:
        """An engine makes as many updates in a step as it likes: they are not counted."""

    def release(self, *, followed: bool) -> None:
        self.engine.close(followed=followed)
