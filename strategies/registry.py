"""The list of strategies. Adding one is a folder here and its name in FOLDERS.

Command line, job file, checks, manual, simulator and worker derive from it; importing it needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from atoll.errors import SettingError
from atoll.strategies.declaration import Metric, Strategy, StrategySettings

AUTO: Final = "auto"
"""Strategy of a job that leaves the choice to the controller."""
FOLDERS: Final = ("dense", "stale_sparse", "local_steps", "zen", "groups", "compressed", "volunteer")
"""Packages of atoll.strategies, each with its STRATEGY; the first is the default."""


@cache
def strategies() -> Mapping[str, Strategy]:
    """All of them, by name."""
    found: list[Strategy] = [importlib.import_module(f"atoll.strategies.{folder}").STRATEGY for folder in FOLDERS]
    return MappingProxyType({strategy.name: strategy for strategy in found})


def default() -> Strategy:
    """The strategy of a job that names none."""
    return next(iter(strategies().values()))


def names() -> tuple[str, ...]:
    """Return the values that a job's `strategy` may have."""
    return (AUTO, *strategies())


def find(name: str, field: str = "strategy") -> Strategy:
    """The strategy of this name; the default one for an empty name and for AUTO. Raises SettingError naming the
    field."""
    if not name or name == AUTO:
        return default()
    if name not in strategies():
        raise SettingError(field, name, "is not known", f"Use one of {', '.join(names())}")
    return strategies()[name]


def of(settings: StrategySettings) -> Strategy:
    """The strategy whose settings these are."""
    return next(strategy for strategy in strategies().values() if isinstance(settings, strategy.settings))


def profiled() -> Strategy:
    """Return the strategy whose compression `atoll profile` measures."""
    return next(strategy for strategy in strategies().values() if strategy.trial_settings)


@cache
def metrics() -> Mapping[str, Metric]:
    """Return all strategies' metrics, by name."""
    return MappingProxyType({metric.name: metric for each in strategies().values() for metric in each.metrics})
