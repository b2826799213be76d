"""The strategy by which a run trains, which a view may change, and what a job says about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.controller.state.records import JobRecord
from atoll.controller.state.views import ViewRecord, ViewState
from atoll.strategies import registry
from atoll.strategies.declaration import Strategy, StrategySettings


def strategy_of(job: JobRecord, view: ViewRecord | None) -> str:
    """Return the name of the strategy by which the view trains; of no view, the one that the job wants."""
    if view is None:
        return job.wanted_strategy
    return view.strategy or job.own_strategy  # a record of an older version names none


def strategy_in_force(job: JobRecord, views: Sequence[ViewRecord]) -> str:
    """Return the name of the strategy by which the newest run trains. views: the kept ones of the run, oldest first."""
    in_force = (view for view in reversed(views) if view.state is ViewState.IN_FORCE)
    first = views[0] if views else None
    newest_left = next((view for view in reversed(views) if view.in_force_unix_s), first)
    return strategy_of(job, next(in_force, newest_left))


def declared(job: JobRecord, strategy: str) -> tuple[Strategy, StrategySettings]:
    """Return a strategy's declaration, and the job's settings of it."""
    found = registry.find(strategy)
    return found, found.settings.model_validate(dict(job.settings_of(strategy)))


def adapted_params(job: JobRecord, strategy: str) -> tuple[str, ...]:
    """Return the strategy's plan parameters that the controller may change.

    A strategy that the job's user did not submit follows the controller in all that strategies leave to it."""
    if strategy == job.spec.strategy:
        return job.spec.adapt.strategy_params
    return registry.find(strategy).plan_parameters.FOLLOWS


def last_change(job: JobRecord, views: Sequence[ViewRecord]) -> str:
    """Return when and why the run's strategy last changed; empty if it trains by the one that it began with."""
    for view in reversed(views):
        if view.previous_strategy and view.in_force_unix_s:
            return f"switched from {view.previous_strategy} to {view.strategy} at step {view.step}: {view.reason}"
    return ""


def why_not_switchable(job: JobRecord, before: str, after: str) -> str:
    """Return why a run cannot leave strategy `before` for `after` at a step boundary; empty if it may."""
    if reason := job.learned.refused_strategies.get(after):
        return f"the job's script does not allow strategy {after}: {reason}"
    for name in (before, after):
        if not registry.find(name).switchable:
            others = ", ".join(one.name for one in registry.strategies().values() if one.switchable)
            what = "leave" if name == before else "begin"
            return (
                f"a run cannot {what} strategy {name} at a step boundary, only change among {others}. Submit the job "
                f"again with --strategy {after}"
            )
    return ""
