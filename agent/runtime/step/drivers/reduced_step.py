"""Driver of a TensorReducer: every step has the gradient of the whole batch, the same on every rank.

Gradients leave while the backward pass goes on. The agreement of the pass travels beside them, so that no rank waits a
round trip for it. The update is torch's own."""

from __future__ import annotations

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.step.backward.reduction import ReducedGradients
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import Norms, Pass, TensorReducer, WorkerHalf
from atoll.agent.runtime.transport.process_groups import Group


class ReducedStep(StepDriver):
    weighs_gradients = True

    def __init__(
        self, parts: StepParts, half: WorkerHalf, coordination: Coordination, reducer: TensorReducer, group: Group
    ) -> None:
        super().__init__(parts, half, coordination)
        self._reducer = reducer
        self._gradients = ReducedGradients(parts.model, reducer, parts.events, parts.links_busy, group.gather_rows)

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        self._reducer.start(origin)

    def expect_local(self) -> None:
        self._gradients.expect_local()

    def begin_pass(self, opened: Pass) -> None:
        """Hooks send gradients from here on, in buckets and always in the same order."""
        self._gradients.begin(opened)

    def end_pass(self) -> Norms:
        """Put sums into p.grad. `act` raises BadInput before that if ranks train different batches."""
        self._gradients.backward_done()
        self.coordination.act()
        return self._gradients.combined()

    def exchange_times(self) -> tuple[float, float]:
        return self._gradients.take_times()

    def waited_for_peers(self) -> float:
        return self._gradients.waited()

    def sent_bytes(self) -> int:
        return self._gradients.sent_bytes()

    def break_off(self) -> None:
        self._gradients.break_off()

    def release(self, *, followed: bool) -> None:
        if followed:
            self._gradients.break_off()
        self._gradients.close()
