"""The limits of telemetry, which workers keep, agents cut down to and the controller insists on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from atoll.jobs.job_spec import MAX_WORKERS
from atoll.strategies import registry
from atoll.v1.agents_pb2 import Prepared
from atoll.v1.common_pb2 import LinkSample, StepSample

MAX_STEPS: Final = 256
MAX_REPORTS: Final = 256
"""Messages of the user's own numbers in a batch: as many as steps."""
MAX_METRICS: Final = 64
"""Numbers in one."""
MAX_NOTICES: Final = 64
MAX_LINKS: Final = 64
MAX_PEERS: Final = MAX_WORKERS
MAX_DROP_REASONS: Final = 16
MAX_REASON: Final = 500
"""Characters of a reason why a script does not allow a strategy."""
MAX_VOLUNTEER: Final = 80
"""Characters of a volunteer's name in a link."""
SGD: Final = "sgd"
ADAPTIVE: Final = "adaptive"
FAMILIES: Final = ("", SGD, ADAPTIVE)
"""Families of optimizers; empty: unknown."""
WAITS: Final = "waits"
FORMS: Final = ("", "float32", "bfloat16", "int8", WAITS)
"""Forms of a link to a volunteer; empty once the link is gone."""
TIERS: Final = ("memory", "disk", "start")
_AMOUNTS: Final = (
    *("step_s", "compute_s", "wait_s", "load_s", "forward_s", "backward_s", "first_bucket_s", "update_s"),
    *("sync_s", "last_sync_s", "local_grad_sqnorm", "global_grad_sqnorm"),
)


amounts_of: Final = attrgetter(*_AMOUNTS)


def are_amounts(numbers: Sequence[float]) -> bool:
    """Return True if all are finite and at least 0. Their sum must be finite too: one check of thousands a second."""
    return math.isfinite(sum(numbers)) and (not numbers or min(numbers) >= 0)


def flaw_of_step(sample: StepSample) -> str | None:
    """Return the flaw of a sample, beginning with the field's name, or None."""
    if not are_amounts(amounts_of(sample)):
        told = zip(_AMOUNTS, amounts_of(sample), strict=True)
        wrong = ((name, value) for name, value in told if not 0 <= value < math.inf)
        field, value = next(wrong, ("the sum of its seconds", math.inf))
        return f"{field} = {value} must be a number of at least 0"
    return flaw_of_metrics(sample) if sample.strategy_metrics else None


def flaw_of_metrics(sample: StepSample) -> str | None:
    """The same of what its strategy measured."""
    for name, value in sample.strategy_metrics.items():
        metric = registry.metrics().get(name)
        if metric is None:
            return f"strategy_metrics = {name[:80]!r} is a metric of no strategy"
        if not 0 <= value <= metric.most:
            return f"strategy_metrics.{name} = {value} must be 0 to {metric.most:g}"
    return None


def flaw_of_facts(prepared: Prepared) -> str | None:
    """Return the flaw of what a worker reports about its script, beginning with the field's name, or None."""
    if unknown := {*prepared.refused, prepared.strategy or registry.default().name} - {*registry.strategies()}:
        return f"refused, strategy = {min(unknown)[:80]!r} is no strategy"
    if any(len(reason) > MAX_REASON for reason in prepared.refused.values()):
        return f"refused has a reason of more than {MAX_REASON} characters"
    if not 0 <= prepared.gradient_density <= 1:  # NaN too
        return f"gradient_density = {prepared.gradient_density} must be 0 to 1"
    return None


def flaw_of_link(link: LinkSample) -> str | None:
    """Return the flaw of a sample, beginning with the field's name, or None."""
    most = MAX_PEERS + MAX_LINKS if link.volunteer else MAX_PEERS
    if link.peer >= most:
        return f"peer = {link.peer} must be below {most}"
    if len(link.volunteer) > MAX_VOLUNTEER:
        return f"volunteer = {link.volunteer[:80]!r} must have at most {MAX_VOLUNTEER} characters"
    if link.form not in FORMS:
        return f"form = {link.form[:80]!r} is none of {', '.join(FORMS[1:])}"
    if not 0 <= link.wait_share <= 1:
        return f"wait_share = {link.wait_share} must be 0 to 1"
    for field in ("busy_s", "goodput_bps", "differs"):
        if not 0 <= (value := getattr(link, field)) < math.inf:  # NaN too
            return f"{field} = {value} must be a number of at least 0"
    return None
