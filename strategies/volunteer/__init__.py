"""Strategy `volunteer`: devices that stay hold model and optimizer; others compute for them and may vanish any moment.

Source: the volunteer pipelines (ICLR 2025 submission), here with one stage. docs/volunteers.md."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Strategy
from atoll.strategies.volunteer.settings import Volunteer

STRATEGY: Final = Strategy(
    name="volunteer",
    summary="every step has the exact gradient of the whole batch, and devices that may vanish at any moment compute "
    "parts of it: for machines that stay, and friends' or spot ones that do not",
    settings=Volunteer,
    metrics=(
        Metric("volunteers", "count", "that would be given a task, of all ranks", "newest"),
        Metric("waiting", "count", "volunteers that wait, because their links are too thin, of all ranks", "newest"),
        Metric("volunteers_share", "share", "of the step's samples, computed by volunteers"),
        Metric("update_share", "share", "of the step's time, from its last answer until the update is made"),
        Metric("per_power", "count", "samples a second that a device of power 1 computes of a rank's tasks", "newest"),
        Metric("answered", "count", "tasks that volunteers answered and that counted, since the run began", "newest"),
        Metric("returned", "count", "tasks that went back to the pool, since the run began", "newest"),
        Metric("late", "count", "answers that were dropped as too late, since the run began", "newest"),
        Metric("refused", "count", "other messages of volunteers that were refused, since the run began", "newest"),
    ),
    exchanges=True,
    worker="atoll.strategies.volunteer.worker:build",
    script_check="atoll.strategies.volunteer.stage_passes:check_script",
    engine=True,
    volunteer="atoll.strategies.volunteer.answering:help_out",
    view="atoll.strategies.volunteer.view:status",
)
