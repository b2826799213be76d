"""Interface of the step drivers, and the backward pass as every driver carries it out.

A driver lives as long as a view of the run. Training calls it in this order:

| when | call |
|---|---|
| all ranks are equal, before the first step | `start` |
| run.backward begins, or the first gradient of the script's own loss.backward() comes | `begin_backward` |
| the pass is over | `end_backward` |
| optimizer.step() begins; is done | `before_update`; `after_update` |
| between two steps | `coordination.agree`, then `boundary` |
| all ranks must have the same model | `flush` |
| a peer is lost | `break_off` |
| the view or the run is over | `close` |

Every method runs on the training thread and raises PeerLost if a peer is gone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from atoll.agent.runtime.channel.agreement import Agreed, Meeting
from atoll.agent.runtime.channel.channel import LINGER_S
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Durable, Handover, NothingBeside, Origin
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.divided_step import DividedStep
from atoll.agent.runtime.step.backward.half_batches import half_batches_of
from atoll.agent.runtime.step.backward.pass_state import PassState
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.evaluated_model import EvaluatedModel
from atoll.agent.runtime.step.measures.clock import StepClock
from atoll.agent.runtime.step.optimizers.dry_run import DryRunSteps
from atoll.agent.runtime.strategy_interface.capabilities import Engine, Norms, Pass, StepEvents, WorkerHalf
from atoll.errors import BadInput, PeerLost


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training that its drivers use."""

    session: Session
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loader: Loader[Any]
    clock: StepClock
    dry_run: DryRunSteps
    evaluated: EvaluatedModel
    passes: PassState
    divided: DividedStep
    events: StepEvents
    own: Callable[[], Agreed]  # what this rank knows
    links_busy: Callable[[bool], None]  # called when gradients begin to fill the links and when none is under way
    batches_per_update: Callable[[int], None]  # called when the script accumulates another number of batches


@dataclass(slots=True)
class CurrentView:
    """The driver of the view that the worker is in, and what its members agreed on last. Both change with the view."""

    driver: StepDriver
    agreed: Agreed


class StepDriver(ABC):
    """One view's part in every training step."""

    combines = True
    """Every step has the gradient of the whole batch, or an engine of its own."""
    weighs_gradients = False
    """The weight of a pass counts. In torch's own backward pass of a single worker it does not."""
    flush_changes = False
    """`flush` changes the model: a checkpoint from before it is not what training ended with."""
    engine: Engine | None = None
    """The engine that makes whole steps in place of the script."""

    def __init__(self, parts: StepParts, half: WorkerHalf, coordination: Coordination) -> None:
        self.parts, self.coordination = parts, coordination
        self.durable: Durable = half.durable
        self.learned = half.learned
        self.needs_rollback = not isinstance(half.durable, NothingBeside)
        """A lost peer takes state along that no other rank has, so the run continues from copies in memory."""
        self._halves = None if self.combines else half_batches_of(parts.session, parts.model, parts.loader)

    # --- what differs from driver to driver

    @property
    def why_not_in_place(self) -> str | None:
        """Return why the run cannot continue with other workers; None if it can."""
        return None

    @property
    def tolerates_loss_mid_step(self) -> bool:
        """True if a step in which a peer is lost is completed without it."""
        return False

    @property
    def step_is_atomic(self) -> bool:
        """True if nothing of a step is left to do at the boundary after it."""
        return False

    @property
    def lost(self) -> str | None:
        """Return who was lost in the step that is over, if the step is whole without it."""
        return None

    @abstractmethod
    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        """Begin to train at `position`, of state `origin` if there is one. Collective; all ranks are equal.

        share: of this rank, of a whole batch there."""

    def begin_pass(self, opened: Pass) -> None:  # noqa: B027 - some drivers have nothing to do
        """A backward pass begins. What this rank knows is proposed already."""

    @abstractmethod
    def end_pass(self) -> Norms:
        """The pass is over on this rank. Return the norms of its gradients, if they are combined.

        Raises BadInput if another rank trains another batch."""

    def expect_local(self) -> None:  # noqa: B027 - some drivers have nothing to do
        """Prepare for passes under run.no_sync. Call before the first one."""

    def before_update(self) -> None:  # noqa: B027 - some drivers have nothing to do
        """optimizer.step() begins."""

    def after_update(self) -> None:
        """optimizer.step() is done."""
        self.coordination.agreement.updated()

    def clip(self, max_norm: float) -> bool:
        """Return True if the strategy clips the next update itself. False: clip p.grad."""
        return False

    def boundary(self, *, wait: bool) -> None:  # noqa: B027 - some drivers have nothing to do
        """Bring updates into the weights between two steps. wait: all of them, the same on every rank."""

    def flush(self, meeting: Meeting) -> None:
        """Make the model the same on every rank. Collective; raises what `meet` raises."""
        self.meet(meeting)
        self.boundary(wait=True)

    def show_shared(self) -> None:  # noqa: B027 - some drivers have nothing to do
        """Give parameters the values of a checkpoint of this moment, until `show_own`. Call after `meet`."""

    def show_own(self) -> None:  # noqa: B027 - some drivers have nothing to do
        """Give parameters back the values that this rank trains."""

    def exchange_times(self) -> tuple[float, float]:
        """Return the seconds that all reductions of the step but the last took, and those of the last."""
        return 0.0, 0.0

    def waited_for_peers(self) -> float:
        """Return the seconds that the training thread waited in the strategy since the last call."""
        return 0.0

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sent outside of the channel since the view began."""
        return 0

    def break_off(self) -> None:  # noqa: B027 - some drivers have nothing to do
        """A peer is gone in the middle of the step: only `close` is called any more, and hooks do nothing."""

    @abstractmethod
    def release(self, *, followed: bool) -> None:
        """Free what the strategy has of this view. followed: as in `close`."""

    def close(self, *, followed: bool = False) -> None:
        """End the driver. followed: by the driver of the run's next view; no peer waits for this rank."""
        if self._halves is not None:
            self._halves.close()
        self.release(followed=followed)
        self.coordination.channel.close(linger_s=0.0 if followed else LINGER_S)

    # --- the backward pass

    @property
    def weight(self) -> float:
        """Weight of this rank's gradients in the open pass, or else of its part of the current batch."""
        passes, current = self.parts.passes, self.parts.loader.current
        if passes.open and passes.weight is not None:
            return passes.weight
        return current.weight if current is not None else 0.0

    def begin_backward(
        self, loss: torch.Tensor | None = None, *, weight: float | None = None, seen: bool = True
    ) -> None:
        """Open a pass and agree on it with the other ranks.

        loss: whose gradients come, if known. weight: of these; None: by samples. seen: the pass begins here; else its
        first gradient came already."""
        parts, passes = self.parts, self.parts.passes
        batch = parts.loader.current
        if parts.evaluated.is_shown:
            parts.evaluated.refuse_training("a backward pass")
        if batch is None:
            raise BadInput("run.backward outside the loop over the loader: there is no batch that is being trained")
        if passes.broken:
            passes.gradients_pending, passes.unsent = True, passes.local
            return
        if passes.open:
            raise BadInput("an earlier backward pass failed half-way; the other ranks wait for the rest of it")
        parts.divided.begin_pass()
        self._note_waits()
        parts.clock.backward_begins(seen=seen and not passes.gradients_pending)
        passes.sampled_batches, passes.weight = 0, weight
        if not passes.muted:
            first, known = not passes.gradients_pending, passes.accumulation.batches
            passes.sampled_batches = passes.accumulation.begin(batch, first=first, local=passes.local)
            if parts.divided.divided:  # p.grad is of passes of unequal weight
                passes.sampled_batches = 0
            if passes.accumulation.batches != known:
                parts.batches_per_update(passes.accumulation.batches)
        opened = Pass(
            batch=batch if weight is None else replace(batch, weight=weight),
            params=passes.params,
            sampled=passes.sampled_batches > 0,
            muted=passes.muted,
            local=passes.local,
            loss=loss.detach() if loss is not None else None,
        )
        try:
            self.coordination.begin_pass(opened, parts.own())
            self.begin_pass(opened)
        except PeerLost as error:
            parts.events.lost(error)
        passes.norms = Norms()
        passes.gradients_pending, passes.open = True, not passes.broken
        passes.unsent = passes.local

    def begin_from_hook(self) -> None:
        """Open the pass of a script that calls loss.backward() itself, and close it before the script goes on."""
        self.begin_backward(seen=False)
        Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self, *, agrees: bool = True) -> None:
        """Close the pass: gradients may be used. agrees: all ranks end it; False after an engine's step."""
        parts, passes = self.parts, self.parts.passes
        if passes.broken:
            return
        parts.clock.pay()
        norms = Norms()
        try:
            norms = self.end_pass() if agrees else norms
            norms = self._halves.take() if self._halves is not None else norms
        except PeerLost as error:
            parts.events.lost(error)
        if passes.broken:
            return
        passes.norms = replace(norms, batches=max(passes.sampled_batches, 1)) if self.combines else norms
        self._note_waits()
        parts.clock.backward_ends()
        passes.open = False
        parts.divided.end_pass()

    def waited(self) -> float:
        """Return the seconds that the training thread waited for others since the last call."""
        return self.coordination.take_waited(self.waited_for_peers())

    def _note_waits(self) -> None:
        self.parts.clock.waited(self.waited())

    # --- all ranks together, between two steps

    def meet(self, meeting: Meeting) -> None:
        """Wait until every rank calls this between the same two passes.

        Raises BadInput where another rank does something else, or has made another number of updates."""
        self.coordination.agreement.meet(meeting, self.parts.own())

    def hand_over(self, step: int, *, keeps_unsent: bool) -> Handover:
        """Return the state beside model and optimizer, at a boundary at which all ranks leave their view.

        keeps_unsent: each rank keeps its own. Raises what `meet` raises."""
        rolling = self.durable.rolling()
        own_moments = rolling is not None and rolling.own_moments
        if keeps_unsent:
            self.meet(Meeting.SYNCHRONIZE)
            self.boundary(wait=True)
            shared, own_state = self.durable.without_flush()
            return Handover(replace(self._origin(step, shared), own=[own_state]), {}, own_moments)
        self.flush(Meeting.SYNCHRONIZE)
        unsent = {name: one.cpu().clone() for name, one in self.durable.own_after_flush().items()}
        if (group := self.parts.session.group) is not None:
            for one in unsent.values():
                group.sum_in_place(one, "handing over what was not sent")
        return Handover(self._origin(step, self.durable.shared()), unsent, own_moments)

    def _origin(self, step: int, shared: Mapping[str, torch.Tensor]) -> Origin:
        session = self.parts.session
        copied = {name: one.clone() for name, one in shared.items()}
        return Origin(session.run, session.view, step, session.place.world_size, copied)

    def abort(self, reason: str) -> None:
        """Wake whatever waits for peers; it raises PeerLost. May be called by any thread."""
        self.coordination.channel.abort(reason)

    def leave(self) -> None:
        """Tell peers that they need nothing more of this rank: training is done, or all ranks stop here."""
        self.coordination.channel.leave()

    def step(self, batch: Any) -> torch.Tensor:
        """Make the whole step of a batch in place of the script. Raises BadInput where the strategy has no engine."""
        raise BadInput("the strategy has no engine of its own: call run.backward(loss) and optimizer.step()")

    def rewind(self, step: int) -> bool:
        """Undo a step that raised, or the last one. False if it cannot be undone."""
        return False
