"""Handling of a lost peer: the run continues without it, or this worker saves what is whole and leaves. A pass that ran
out of memory is aborted likewise, and its members meet again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from atoll.agent.runtime.data.sampler import after
from atoll.agent.runtime.membership.transition.view_transition import ViewTransition
from atoll.agent.runtime.session.out_of_memory import OutOfMemory, is_out_of_memory
from atoll.agent.runtime.step.drivers.step_driver import CurrentView
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.errors import AtollError, PeerLost


class PeerLossHandler:
    """Used by the training thread alone."""

    def __init__(self, current: CurrentView, succession: ViewTransition, state: StateKeeper) -> None:
        self._current, self._succession, self._state = current, succession, state
        self._parts = current.driver.parts
        self._least_overflow = math.inf  # samples for which memory did not suffice in this process

    def abort_step(self, error: AtollError) -> None:
        """Abort the step, because a peer is lost in it. What the script does up to its next batch has no effect then.

        If the run cannot continue in place, save what is whole and leave. Raises BadInput if the peer is not lost but
        waits for a call that this rank's script does not make."""
        driver, passes = self._current.driver, self._parts.passes
        driver.coordination.check_alike()
        if not self._succession.possible:
            self.leave(error)
        why = "an epoch's last batch was shown again" if self._parts.dry_run() else driver.why_not_in_place
        self._succession.lose(error, mid_step=why)
        passes.broken, passes.open = True, False
        driver.break_off()

    def aborts_overflow(self, error: BaseException) -> bool:
        """Abort the step if the error says that memory did not suffice, and a smaller batch may help.

        Return False where the script is to get the error: nothing was aborted, and the worker ends by it."""
        batch = self._parts.loader.current
        if batch is None or not is_out_of_memory(error) or not 1 < batch.local < self._least_overflow:
            return False
        stays = self._parts.dry_run() or self._current.driver.why_not_in_place is not None
        if stays or not self._succession.can_abort():
            return False
        self._least_overflow = batch.local
        if self._parts.session.device.type == "cuda":
            torch.cuda.empty_cache()
        self.abort_step(OutOfMemory(batch.local, error))
        return True

    def leave(self, error: AtollError) -> NoReturn:
        """Save what is whole, and end."""
        batch = self._parts.loader.current
        step = self._parts.loader.position.step
        self._state.shutdown.lost(error, step, after(batch) if batch is not None else None)

    @contextmanager
    def leaves_if_lost(self) -> Iterator[None]:
        """Enclose a call that needs other ranks outside of a step. If one is lost there, leave."""
        try:
            yield
        except PeerLost as error:
            self._current.driver.coordination.check_alike()
            self._succession.unable("it was lost outside of a step", error)
            self.leave(error)

    @contextmanager
    def aborts_if_lost(self) -> Iterator[None]:
        """Enclose a call that needs other ranks inside a step. If one is lost there, abort the step."""
        try:
            yield
        except PeerLost as error:
            self.abort_step(error)
