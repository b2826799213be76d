"""Strategy `compressed`: gradients are compressed with error feedback; a plan says which, where, and how they are sent.

Source: Espresso and Cupcake (Wang, 2023). docs/strategies.md has the guarantees and their limits."""

from __future__ import annotations

from typing import Final

from atoll.strategies.compressed.costs.measured import MeasuredCosts
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.declaration import Metric, Strategy, Traffic

STRATEGY: Final = Strategy(
    name="compressed",
    summary="`dense`, but gradients are compressed where that is sooner: for links too thin for whole gradients",
    settings=Compressed,
    plan_parameters=CompressedPlan,
    message=MeasuredCosts,
    metrics=(
        Metric("compression", "share", "bytes of messages, of those of whole gradients"),
        Metric("stall_s", "s", "waiting for others' gradients", "share of the step"),
        Metric("sent_bytes", "bytes", "that left on the wire in this step"),
    ),
    exchanges=True,
    relayed=True,
    switchable=True,
    kept_state="unsent gradients",
    steps_for_one=1.0,
    steps_range=(1.0, 1.03),
    exchange=Traffic(kind="compressed-gradients", value_bytes=2.0),
    worker="atoll.strategies.compressed.worker:build",
    script_check="atoll.strategies.compressed.script_check:check_script",
    controller="atoll.strategies.compressed.controller:CompressedController",
    simulator="atoll.strategies.compressed.simulate:CompressedSteps",
    view="atoll.strategies.compressed.view:status",
)
