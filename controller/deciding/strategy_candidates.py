"""Strategies that a controller chooses from, as planner `strategy` takes them."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.controller.planners.strategy_choice.facts import StrategyCandidate
from atoll.strategies import registry


def candidates(refused: Mapping[str, str]) -> tuple[StrategyCandidate, ...]:
    """Return all strategies whose steps can be compared, by default settings, those that teach most surely first.

    refused: by name, why a script does not allow a strategy."""
    return tuple(
        StrategyCandidate(
            name=one.name,
            exchange=one.exchange.kind,
            value_bytes=one.exchange.value_bytes,
            density=one.exchange.density,
            steps=one.steps_for_one,
            least_steps=one.steps_range[0],
            most_steps=one.steps_range[1],
            refused=refused.get(one.name, ""),
        )
        for one in sorted(registry.strategies().values(), key=lambda one: one.steps_range[1])
        if one.exchange is not None
    )
