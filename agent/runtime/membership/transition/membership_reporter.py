"""Reports to the controller where a worker is in the life of its run's views: stage, step and times."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.agent.runtime.session.session import Session
from atoll.network.message_limits import MAX_REASON
from atoll.strategies import registry
from atoll.v1.common_pb2 import VIEW_STAGE_JOINING, VIEW_STAGE_READY, ViewReport, ViewStage, ViewTimes


class MembershipReporter:
    """Used by the training thread alone; the link's thread sends the reports."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._times_begin_s = 0.0
        self._times: ViewTimes | None = None  # of the way into the view that is formed, or was formed last
        self._stage: ViewStage.ValueType | None = None
        self._takes_in = self._tolerates_loss = False  # as last reported while the worker trained
        self._trained = False  # a step of this view is complete

    @property
    def awaits_admission(self) -> bool:
        """True if the worker has been in no view yet, and no view is being formed with it."""
        return self._stage in (VIEW_STAGE_JOINING, VIEW_STAGE_READY)

    def begin_times(self) -> None:
        """Start the clock of a view change: the view is broken, or left."""
        self._times_begin_s, self._times, self._trained = time.monotonic(), ViewTimes(), False

    def mark_time(self, field: str) -> None:
        """Record that the change has come to `field` of `ViewTimes`. The first time counts: forming may be retried."""
        if self._times is not None and not getattr(self._times, field):
            setattr(self._times, field, max(time.monotonic() - self._times_begin_s, 1e-6))

    def report(
        self, stage: ViewStage.ValueType, step: int, *, view: int = 0, reason: str = "", overflow_batch: int = 0
    ) -> None:
        """Report a stage. view: 0 is the view that the worker is in. overflow_batch: as in ViewReport."""
        self._stage = stage
        if self._session.link is not None:
            self._session.link.stand(
                ViewReport(
                    view=view or self._session.view,
                    stage=stage,
                    step=step,
                    reason=reason[:MAX_REASON],
                    overflow_batch=overflow_batch,
                    times=self._times,
                    takes_in=self._takes_in,
                    tolerates_loss_mid_step=self._tolerates_loss,
                    strategy=registry.of(self._session.strategy).name,
                    refusal=self._session.refusal,
                )
            )

    def report_training(
        self,
        stage: ViewStage.ValueType,
        step: int,
        trained: bool,
        *,
        takes_in: Callable[[], bool],
        tolerates_loss_mid_step: bool,
    ) -> None:
        """Report at a boundary, where there is news. trained: a step of the view is complete. takes_in: whether the
        worker can leave the view at a boundary for a view with joiners. tolerates_loss_mid_step: whether a step is
        completed without a peer that is lost in it."""
        if trained and not self._trained:
            self._trained = True
            self.mark_time("first_step_s")
            self._stage = None
        if self._stage != stage:
            self._takes_in = takes_in()
            self._tolerates_loss = tolerates_loss_mid_step and self._takes_in
            self.report(stage, step)
