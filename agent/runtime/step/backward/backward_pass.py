"""The backward pass, from run.backward or the user's own loss.backward() until its gradients may be used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import Variable

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.step.backward.accumulation import Accumulation
from atoll.agent.runtime.step.capabilities import Norms, Pass
from atoll.agent.runtime.step.measures.clock import StepClock
from atoll.agent.runtime.step.plans.agreement import Agreed
from atoll.agent.runtime.step.plans.schedule import PlanSchedule
from atoll.agent.runtime.step.step_exchange import StepExchange
from atoll.errors import BadInput


class BackwardPass:
    """`begin` and `end` of one pass after the other."""

    def __init__(
        self,
        session: Session,
        loader: Loader[Any],
        schedule: PlanSchedule,
        clock: StepClock,
        exchange: StepExchange,
        *,
        own: Callable[[], Agreed],
        muted: Callable[[], bool],
        if_lost: Callable[[], AbstractContextManager[None]],
        own_norms: Callable[[], Norms] | None,
        refuse_training: Callable[[str], None],
    ) -> None:
        """own: what this rank knows. muted: whether nothing counts of what the script does now. if_lost: around what
        needs the others; sets `broken` where the run goes on without one. own_norms: after a pass, of this rank's own
        gradients; None: those of all are combined.
        refuse_training: raises BadInput while the model is evaluated."""
        self._session, self._loader, self._schedule = session, loader, schedule
        self._clock, self.exchange = clock, exchange
        self._own, self._muted, self._if_lost, self._own_norms = own, muted, if_lost, own_norms
        self.open = False
        self.broken = False  # passes are for show: a peer was lost, and the next view is not there yet
        self.gradients_pending = False  # a backward pass since the last optimizer.step()
        self.local = False  # the passes that begin now are
        self.unsent = False  # the last one was: other ranks lack what p.grad has
        self.norms = Norms()
        self.accumulation = Accumulation()
        self._sampled_batches = 0
        self._refuse_training = refuse_training
        self._weight: float | None = None

    @property
    def weight(self) -> float:
        """Of this rank's gradients in the pass that is open, or else of the batch's part that is being trained."""
        current = self._loader.current
        return (
            self._weight if self.open and self._weight is not None else current.weight if current is not None else 0.0
        )

    def begin(self, loss: torch.Tensor | None = None, *, weight: float | None = None, seen: bool = True) -> None:
        """loss: whose gradients come, where that is known. weight: of these; None: by samples. seen: the backward pass
        begins here; else it came to its first gradient already."""
        batch = self._loader.current
        self._refuse_training("a backward pass")
        if batch is None:
            raise BadInput("run.backward outside the loop over the loader: there is no batch that is being trained")
        if self.broken:
            self.gradients_pending, self.unsent = True, self.local
            return
        if self.open:
            raise BadInput("an earlier backward pass failed half-way; the other ranks wait for the rest of it")
        self._note_waits()
        self._session.throttle.pay()
        self._clock.backward_begins(seen=seen and not self.gradients_pending)
        own, muted = self._own(), self._muted()
        self._sampled_batches = 0
        if not muted:
            first = not self.gradients_pending
            self._sampled_batches = self.accumulation.begin(batch, first=first, local=self.local)
        self._weight = weight
        opened = Pass(
            batch=batch if weight is None else replace(batch, weight=weight),
            params=self._schedule.planned_at(batch.step).params,
            sampled=self._sampled_batches > 0,
            muted=muted,
            local=self.local,
            loss=loss.detach() if loss is not None else None,
        )
        with self._if_lost():
            self.exchange.begin(opened, own)
        self.norms = Norms()
        self.gradients_pending, self.open = True, not self.broken
        self.unsent = self.local

    def begin_from_hook(self) -> None:
        """The user called loss.backward() himself: the pass must still be closed before he sees the gradients."""
        self.begin(seen=False)
        Variable._execution_engine.queue_callback(self.end)

    def gradients_leave(self) -> None:
        """The first ones are about to."""
        self._session.throttle.pay()
        self._clock.bucket_ready()

    def break_off(self) -> None:
        """The user's backward pass raised. Alone, he may skip this batch and go on."""
        self.open = self._session.group is not None

    def break_pass(self) -> None:
        """A peer is gone: this pass, and those up to the next view, are for show."""
        self.broken, self.open = True, False
        self.exchange.break_off()

    def resume(self, exchange: StepExchange, own_norms: Callable[[], Norms] | None) -> None:
        """At a boundary whose update is whole: passes count again, and go by this exchange."""
        self.broken = self.open = self.gradients_pending = self.unsent = False
        self.exchange, self._own_norms = exchange, own_norms

    def end(self, *, agrees: bool = True) -> None:
        """agrees: with all other ranks; where one was lost there is nothing to agree upon."""
        if self.broken:
            return
        throttle = self._session.throttle
        throttle.pay()
        combined = Norms()
        with self._if_lost():
            combined = self.exchange.end() if agrees else combined
        if self.broken:
            return
        sampled = replace(combined, batches=max(self._sampled_batches, 1))
        self.norms = sampled if self._own_norms is None else self._own_norms()
        self._note_waits()
        self._clock.backward_ends()
        throttle.resume()
        self.open = False

    def _note_waits(self) -> None:
        """What the training thread waited for others since it was last asked."""
        waited_s = self.exchange.waited()
        self._session.throttle.waited(waited_s)
        self._clock.waited(waited_s)
