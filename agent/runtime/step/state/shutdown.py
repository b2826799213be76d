"""Ends training before its script does: on request, for a peer that is gone, or because nothing moves any more;
and where the trial of a profile is over.

Whoever leaves saves what it can, says so, and ends with the exit code that its agent understands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from atoll.agent.runtime.agent_link import exits
from atoll.agent.runtime.checkpoints.saver import Saver
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.snapshot import Snapshot
from atoll.agent.runtime.session.probe import Probe
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.drivers.step_driver import StepDriver
from atoll.errors import exit_codes


class Shutdown:
    """All methods run on the training thread, but for `overdue`."""

    def __init__(
        self,
        session: Session,
        snapshot: Snapshot,
        saver: Saver,
        exchange: StepDriver,
        *,
        updating: threading.Lock,
        hold: Callable[[], None],
    ) -> None:
        """updating: held by the training thread while model and optimizer are between two steps. hold: take it."""
        self._session, self._snapshot, self._saver = session, snapshot, saver
        self.exchange, self._updating, self._hold = exchange, updating, hold
        self.updated = False  # an optimizer.step() since the last snapshot, which no longer tells the whole state
        self.code: int | None = None  # the exit code, once it is decided

    def tried(self, probe: Probe) -> NoReturn:
        """A trial of `atoll profile` has seen enough, on all ranks at once."""
        if self._session.group is not None:
            self._session.group.barrier()
        self.exchange.leave()
        probe.end()
        self._leave(exit_codes.FINISHED)

    def drained(self, step: int) -> NoReturn:
        """All ranks stop at this boundary."""
        link = self._session.link
        self._obey()
        where = self._saver.save()
        self.exchange.leave()
        reason = link.stop.reason if link is not None and link.stop is not None else "another worker was asked to"
        exits.say(f"rank {self._session.place.rank} stops after step {step}: {reason}{_as_words(where)}")
        self._leave(exit_codes.DRAINED)

    def lost(self, why: Exception, step: int, updated_to: Position | None) -> NoReturn:
        """A peer is gone in this step. Saves the last boundary's state, unless it was updated since; then that of
        `updated_to`, where the strategy's is whole."""
        self._hold()
        self._obey()
        self.exchange.durable.freeze()
        if self.updated and self.exchange.durable.survives_update and updated_to is not None:
            self._snapshot.take(updated_to)
            self.updated = False
        where = None if self.updated else self._saver.save_in_emergency()
        rank = self._session.place.rank
        exits.say(f"rank {rank} lost a peer in step {step} ({why}){_as_words(where)}; exit code {exit_codes.PEER_LOST}")
        self._leave(exit_codes.PEER_LOST)

    def left_out(self, why: str) -> NoReturn:
        """The run goes on without this worker, and has the state."""
        self._hold()
        self._obey()
        exits.say(f"rank {self._session.place.rank} is excluded from the run: {why}")
        self._leave(exit_codes.DRAINED)

    def overdue(self, timeout_s: float) -> None:
        """Save the last boundary's state on the link thread, as the training thread does not come to its next one.

        The device may be stuck in a collective: it is aborted first, and what is read follows the boundary alone."""
        may_read = self._updating.acquire(timeout=timeout_s)
        try:
            if self._session.group is not None:
                self._session.group.abort()
            self.exchange.durable.freeze()
            with self._snapshot.readable():
                where = self._saver.save_in_emergency() if may_read else None
            trained = self._session.link is not None and self._session.link.trained
            how = "does so after training, before the script's end" if trained else "is stuck"
            exits.say(f"rank {self._session.place.rank} was asked to stop and {how}{_as_words(where)}")
            exits.end_now(exit_codes.PEER_LOST)
        finally:
            if may_read:
                self._updating.release()

    @contextmanager
    def obeyed(self) -> Iterator[None]:
        """Inside, a stop needs nobody but who is at work here."""
        link = self._session.link
        if link is None:
            yield
            return
        before, link.obeyed = link.obeyed, True
        try:
            yield
        finally:
            link.obeyed = before

    def _obey(self) -> None:
        """Note that the requested stop is being carried out."""
        if self._session.link is not None:
            self._session.link.obeyed = True

    def _leave(self, code: int) -> NoReturn:
        self.code = code
        raise exits.WorkerExit(code)


def _as_words(where: Path | None) -> str:
    return "" if where is None else f"; checkpoint {where}"
