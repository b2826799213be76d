"""The limits of telemetry, which workers keep, agents cut down to and the controller insists on."""

from __future__ import annotations

import math
from typing import Final

from atoll.jobspec import MAX_WORKERS
from atoll.strategies import registry
from atoll.v1.common_pb2 import LinkSample, StepSample

MAX_STEPS: Final = 256
MAX_METRICS: Final = 64
"""Messages of the user's own numbers in a batch, and numbers in one."""
MAX_NOTICES: Final = 64
MAX_LINKS: Final = 64
MAX_PEERS: Final = MAX_WORKERS
MAX_DROP_REASONS: Final = 16
TIERS: Final = ("memory", "disk", "start")
_AMOUNTS: Final = (
    *("step_s", "compute_s", "wait_s", "load_s", "forward_s", "backward_s", "first_bucket_s", "update_s"),
    *("sync_s", "last_sync_s", "local_grad_sqnorm", "global_grad_sqnorm"),
)


def flaw_of_step(sample: StepSample) -> str | None:
    """What makes no sense in it, beginning with the field's name; None: nothing."""
    for field in _AMOUNTS:
        if not 0 <= (value := getattr(sample, field)) < math.inf:  # NaN too
            return f"{field} = {value} must be a number of at least 0"
    for name, value in sample.strategy_metrics.items():
        metric = registry.metrics().get(name)
        if metric is None:
            return f"strategy_metrics = {name[:80]!r} is a metric of no strategy"
        if not 0 <= value <= metric.most:
            return f"strategy_metrics.{name} = {value} must be 0 to {metric.most:g}"
    return None


def flaw_of_link(link: LinkSample) -> str | None:
    """What makes no sense in it, beginning with the field's name; None: nothing."""
    if link.peer >= MAX_PEERS:
        return f"peer = {link.peer} must be below {MAX_PEERS}"
    for field in ("busy_s", "goodput_bps"):
        if not 0 <= (value := getattr(link, field)) < math.inf:  # NaN too
            return f"{field} = {value} must be a number of at least 0"
    return None
