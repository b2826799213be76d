"""Holds what is known of a run's views: their records, and how each worker says that it stands towards them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from atoll.controller.state.views import ViewRecord, ViewState


class ViewStage(Enum):
    """Stages of a worker in its run's views; atoll.v1.ViewStage describes each."""

    JOINING = auto()
    READY = auto()
    TRAINING = auto()
    BROKEN = auto()
    FORMING = auto()
    FAILED = auto()
    UNABLE = auto()


class WayIn(NamedTuple):
    """Seconds of a worker's way into its view, since it noticed that the one before was over; 0: not come to that."""

    aborted_s: float = 0.0
    told_s: float = 0.0
    met_s: float = 0.0
    agreed_s: float = 0.0
    first_step_s: float = 0.0


class WorkerViewReport(NamedTuple):
    """A worker's own word. step: completed ones. lost: ranks that it misses, where it can tell. takes_in: it can leave
    a view at a boundary. tolerates_loss_mid_step: it completes a step in which a peer is
    lost, and comes to a boundary.
    handed_bytes: of state that changed hands so far, between it and others."""

    view: int
    stage: ViewStage
    step: int = 0
    reason: str = ""
    lost: tuple[int, ...] = ()
    way: WayIn = WayIn()
    takes_in: bool = False
    tolerates_loss_mid_step: bool = False
    handed_bytes: int = 0

    def left_for(self, view: int) -> bool:
        """Return True if it has left every view older than this one for good."""
        return self.view >= view and self.stage not in (ViewStage.JOINING, ViewStage.READY)

    def trains_in(self, view: int) -> bool:
        return self.view == view and self.stage is ViewStage.TRAINING


@dataclass(frozen=True, slots=True)
class ObservedViews:
    """The kept views of the newest run, oldest first. On this leader's monotonic clock: `since_s`, since when the
    newest is in its state; `broken_since_s`, since when a member is lost or says that it is broken, None where none is;
    `joining_since_s`, since when the newest joiner is there; `handed_since_s`, when state last moved between members.
    `sent`: by node, the newest view that its present stream carried, and the newest in force that it told of."""

    kept: tuple[ViewRecord, ...] = ()
    since_s: float = 0.0
    broken_since_s: float | None = None
    joining_since_s: float = 0.0
    sent: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    handed_since_s: float = 0.0

    @property
    def newest(self) -> ViewRecord | None:
        return self.kept[-1] if self.kept else None

    @property
    def in_force(self) -> ViewRecord | None:
        """Return the view in force; there is at most one."""
        return next((view for view in reversed(self.kept) if view.state is ViewState.IN_FORCE), None)
