"""The standing of a worker towards the views of its run, as it tells the controller: stage, step and times."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.agent.runtime.api.session import Session
from atoll.network.message_limits import MAX_REASON
from atoll.v1.common_pb2 import VIEW_STAGE_JOINING, VIEW_STAGE_READY, ViewReport, ViewStage, ViewTimes


class Standing:
    """Used by the training thread alone; the link's tells it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._noticed_s = 0.0
        self._times: ViewTimes | None = None
        self._stage: ViewStage.ValueType | None = None
        self._takes_in = self._tolerates_loss = False  # as it was said last while it trained
        self._trained = False  # a step of this view is complete

    @property
    def times(self) -> ViewTimes | None:
        """Of the way into the view that is formed, or was last."""
        return self._times

    @property
    def waits(self) -> bool:
        """Whether it was in no view yet, and none is being formed with it."""
        return self._stage in (VIEW_STAGE_JOINING, VIEW_STAGE_READY)

    def noticed(self) -> None:
        """The view is broken, or left."""
        self._noticed_s, self._times, self._trained = time.monotonic(), ViewTimes(), False

    def came_to(self, what: str) -> None:
        """The first time counts: a view may be formed several times."""
        if self._times is not None and not getattr(self._times, what):
            setattr(self._times, what, max(time.monotonic() - self._noticed_s, 1e-6))

    def say(self, stage: ViewStage.ValueType, step: int, *, view: int = 0, reason: str = "") -> None:
        """view: 0 is the one that it is in."""
        self._stage = stage
        if self._session.link is not None:
            self._session.link.stand(
                ViewReport(
                    view=view or self._session.view,
                    stage=stage,
                    step=step,
                    reason=reason[:MAX_REASON],
                    times=self._times,
                    takes_in=self._takes_in,
                    tolerates_loss_mid_step=self._tolerates_loss,
                )
            )

    def trains(
        self,
        stage: ViewStage.ValueType,
        step: int,
        trained: bool,
        *,
        takes_in: Callable[[], bool],
        tolerates_loss_mid_step: bool,
    ) -> None:
        """At a boundary. trained: a step of the view is complete. takes_in: whether it can leave the view for one with
        others in it; asked where there is news. tolerates_loss_mid_step: a step
        that loses a peer is completed without it."""
        if trained and not self._trained:
            self._trained = True
            self.came_to("first_step_s")
            self._stage = None
        if self._stage != stage:
            self._takes_in = takes_in()
            self._tolerates_loss = tolerates_loss_mid_step and self._takes_in
            self.say(stage, step)
