"""A job as the leader has it in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.controller.jobs.model.members import Seats, living, members_of, seats_of
from atoll.controller.jobs.model.strategy_in_force import strategy_in_force
from atoll.controller.state.records import JobRecord, PlacementRecord, PlanRecord, RunRecord
from atoll.controller.state.recovery import CommitRecord
from atoll.controller.state.views import ViewRecord


@dataclass(slots=True)
class JobState:
    """A job with its newest run, that run's placement, plans and views, and what is complete in memory. `revision` and
    `created` are etcd's, of the job's key.

    The rest is this controller's own: since when the phase lasts, since when a rank has finished, when the newest
    plan was issued, when free devices were last assessed, since when the newest view is in its state, since when a
    worker says that it is broken, since when the newest joiner is there, when state last moved between its workers
    (monotonic). `stale`: a write had an unknown outcome, so read before the next one.
    """

    job: JobRecord
    revision: int
    created: int
    since_s: float
    run: RunRecord | None = None
    plans: tuple[PlanRecord, ...] = ()
    views: tuple[ViewRecord, ...] = ()
    placement: PlacementRecord | None = None
    commit: CommitRecord | None = None
    finished_since_s: float | None = None
    planned_s: float = 0.0
    judged_s: float = -math.inf
    view_since_s: float = 0.0
    broken_since_s: float | None = None
    joining_since_s: float = 0.0
    handed_bytes: Mapping[int, int] = field(default_factory=dict)  # by rank of the run, as it was last looked at
    handed_since_s: float = 0.0
    refused: tuple[int, int] | None = None  # run and plan under which the planner was told to find no other
    stale: bool = False
    _seats: Seats | None = None

    @property
    def seats(self) -> Seats | None:
        """Seats of the run under its newest view, None before the first run."""
        if self.run is None:
            return None
        view, known = self.views[-1] if self.views else None, self._seats
        if known is None or known.run is not self.run or known.view is not view:
            known = self._seats = seats_of(self.run, view)
        return known

    @property
    def living(self) -> int:
        """Members of the run's newest view that are not known to have ended."""
        view = self.views[-1] if self.views else None
        return len(living(members_of(self.run, view))) if self.run is not None else 0

    @property
    def strategy(self) -> str:
        """The strategy by which the newest run trains; before the first one, the wanted one."""
        return strategy_in_force(self.job, self.views)

    @property
    def is_short(self) -> bool:
        """True if its run has lost workers, for which standby devices are kept."""
        return bool(self.views) and self.living < self.views[-1].wanted
