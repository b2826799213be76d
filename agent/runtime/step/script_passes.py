"""Calls of the script inside one step: run.backward, run.no_sync, run.clip_grad_norm, and the step of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.step.backward.counted_passes import CountedPasses
from atoll.agent.runtime.step.backward.gradient_passes import clip_norm
from atoll.agent.runtime.step.drivers.step_driver import CurrentView
from atoll.agent.runtime.step.peer_loss import PeerLossHandler
from atoll.agent.runtime.step.state.shutdown import Shutdown
from atoll.agent.runtime.step.update_hooks import UpdateHooks, UpdateParts
from atoll.errors import BadInput, PeerLost


def check_loss(loss: torch.Tensor) -> None:
    """Raise BadInput unless `loss` is one number with a gradient."""
    if not isinstance(loss, torch.Tensor):
        raise BadInput(f"run.backward got a {type(loss).__name__}; pass the loss tensor, without .item()")
    if loss.numel() != 1:
        raise BadInput(f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch")
    if not loss.requires_grad:
        raise BadInput("the loss has no gradient; was it computed under torch.no_grad() or detached?")


class ScriptPasses:
    """Used by the training thread alone."""

    def __init__(
        self,
        current: CurrentView,
        counted: CountedPasses,
        updates: UpdateHooks,
        update_parts: UpdateParts,
        losses: PeerLossHandler,
    ) -> None:
        self._current, self._counted, self._updates, self._losses = current, counted, updates, losses
        self._parts = current.driver.parts
        self._passes = self._parts.passes
        self._member: MemberState = update_parts.member
        self._shutdown: Shutdown = update_parts.state.shutdown
        self._scaled, self._non_finite = update_parts.scaled, update_parts.non_finite

    @property
    def stuck(self) -> bool:
        """True if a backward pass was broken off: its collectives are still under way."""
        return self._passes.open and self._parts.session.group is not None

    def backward(self, loss: torch.Tensor, *, count: float | None, summed: bool) -> None:
        """Make a backward pass. Afterwards every p.grad is that of the whole job's batch.

        loss: []. count: the number that the loss is the mean over; None: the samples. summed: the loss is a sum over
        the samples."""
        check_loss(loss)
        passes, driver, batch = self._passes, self._current.driver, self._parts.loader.current
        weight, divided = None, self._parts.divided
        if batch is not None and not passes.broken:
            divided.restore()
            exchanged_before = passes.gradients_pending and not passes.unsent
            weight = self._counted.weight(count, batch, local=passes.local, after_exchange=exchanged_before)
        if self._parts.session.probe is not None and batch is not None:
            self._parts.session.probe.saw(batch, loss)
        if summed and driver.weight > 0:  # the driver multiplies by this weight
            loss = loss / driver.weight
        own_weight = weight
        if divided.divided and batch is not None and weight is None:
            own_weight = batch.weight
        scales_itself = own_weight is not None and not driver.weighs_gradients
        driver.begin_backward(loss, weight=weight)
        # A loss of weight 0 counts nowhere, and a GradScaler sees to overflows itself.
        if batch is not None and driver.weight > 0 and self._scaled.scaler is None and not passes.muted:
            self._non_finite.loss(loss.detach())
        try:
            if not scales_itself:
                loss.backward()  # type: ignore[no-untyped-call]
            elif own_weight:  # 0 * NaN would be NaN
                (loss * own_weight).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if self._losses.aborts_overflow(error):
                return
            passes.open = self._parts.session.group is not None  # a single worker may skip this batch and continue
            raise
        driver.end_backward()

    def step(self, batch: Any) -> torch.Tensor:
        """Make the engine's whole step of a batch from the loader, in place of the script's passes and update.

        Returns the loss, []. Raises BadInput where the strategy has no engine."""
        driver, passes = self._current.driver, self._passes
        if driver.engine is None:
            return driver.step(batch)  # refuses
        driver.begin_backward()
        loss = torch.zeros(())
        if self._member.aborted is None:
            try:
                loss = driver.step(batch)
            except PeerLost as error:
                taken = self._parts.loader.current
                if taken is not None and driver.rewind(taken.step):
                    self._shutdown.updated = False
                self._losses.abort_step(error)
            else:  # also where this rank had no part in it, or made no update of its own
                passes.gradients_pending, self._shutdown.updated = False, True
                self._non_finite.loss(loss)
        if self._member.aborted is not None:  # an engine's step is whole, or nothing of it is left
            self._member.aborted.updated, passes.gradients_pending = True, False
        driver.end_backward(agrees=False)  # at the boundary: what the script does until then is of a whole step
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the passes inside on this rank."""
        self._current.driver.expect_local()
        before, self._passes.local = self._passes.local, True
        try:
            yield
        finally:
            self._passes.local = before

    def clip(self, max_norm: float, parameters: Iterable[torch.Tensor] | None) -> torch.Tensor | None:
        """Clip the next update. Returns the norm, or None where the strategy clips later than this."""
        if self._parts.divided.partial:
            return torch.zeros(())  # the last pass of the batch has its gradient
        if not self._passes.gradients_pending:
            raise BadInput("run.clip_grad_norm before run.backward: there is no gradient to clip yet")
        self._updates.refuse_unsent("run.clip_grad_norm")
        if self._member.aborted is None and self._current.driver.clip(max_norm):
            if parameters is not None:
                raise BadInput("the strategy clips the whole update; call run.clip_grad_norm without parameters")
            return None
        return clip_norm(self._parts.model.parameters() if parameters is None else parameters, max_norm)
