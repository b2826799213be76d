"""Strategy `groups`: replicas train at their own pace, and those that are ready at the same time average.

Source: SDPipe (Miao et al., 2023). docs/strategies.md has the guarantees and their limits."""

from __future__ import annotations

from typing import Final

from atoll.strategies.declaration import Metric, Strategy
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.settings import Groups

STRATEGY: Final = Strategy(
    name="groups",
    summary="replicas train at their own pace and average in groups of those that are ready: for workers of unequal "
    "or changing speed",
    settings=Groups,
    message=GroupsMessage,
    metrics=(
        Metric("samples_share", "share", "of the round's samples, trained by this replica"),
        Metric("group_share", "share", "of all replicas, in the mean group that this one averaged with"),
        Metric("wait_s", "s", "waiting for a group and for its members", "share of the step"),
        Metric("bubble_share", "share", "of the time that batches took, in which the stage waited for other stages"),
        Metric("unaveraged_s", "s", "longest that this replica trained in the round without an average"),
        Metric(
            "disagreement",
            "share",
            "how far this replica's parameters are from their stage's mean as the round ends, of the mean's norm",
        ),
        Metric("sent_bytes", "bytes", "that left on the wire in this round"),
    ),
    exchanges=True,
    worker="atoll.strategies.groups.worker:build",
    script_check="atoll.strategies.groups.replica_state:check_script",
    engine=True,
    scheduler="atoll.strategies.groups.scheduler:GroupScheduler",
    view="atoll.strategies.groups.view:status",
)
