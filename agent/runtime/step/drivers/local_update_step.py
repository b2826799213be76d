"""Driver of a LocalUpdate: each rank updates its own weights at once, and others' updates come later.

Proposals travel as messages of the channel. They are acted on at a boundary, `lag` passes later, when the weights of
that pass must have arrived anyway."""

from __future__ import annotations

from atoll.agent.runtime.channel.agreement import Meeting
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import LocalUpdate, Norms, Pass, WorkerHalf


class LocalUpdateStep(StepDriver):
    combines = False
    weighs_gradients = True

    def __init__(self, parts: StepParts, half: WorkerHalf, coordination: Coordination, update: LocalUpdate) -> None:
        super().__init__(parts, half, coordination)
        self.update = update
        self.flush_changes = update.flush_changes

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        self.update.start(position, share, origin)

    def expect_local(self) -> None:
        self.update.expect_local()

    def begin_pass(self, opened: Pass) -> None:
        self.update.begin(opened)
        self.coordination.agreement.lag = self.update.lag

    def end_pass(self) -> Norms:
        """No rank waits here for the others' proposals: `coordination.agree` does at the boundary."""
        self.update.backward_done()
        return self.update.combined()

    def before_update(self) -> None:
        self.update.before_update()

    def after_update(self) -> None:
        self.update.after_update()
        super().after_update()

    def clip(self, max_norm: float) -> bool:
        return self.update.clip(max_norm)

    def boundary(self, *, wait: bool) -> None:
        self.update.boundary(wait=wait)

    def meet(self, meeting: Meeting) -> None:
        """Send the last update first: a rank that does not meet would wait for it and not say what it does."""
        self.update.send_update()
        super().meet(meeting)

    def flush(self, meeting: Meeting) -> None:
        super().flush(meeting)
        self.update.flush()

    def show_shared(self) -> None:
        self.update.show_shared()

    def show_own(self) -> None:
        self.update.show_own()

    def waited_for_peers(self) -> float:
        return self.update.waited()

    def break_off(self) -> None:
        self.update.break_off()

    def release(self, *, followed: bool) -> None:
        if followed:
            self.update.break_off()
        self.update.close()
