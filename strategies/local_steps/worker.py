"""Worker half of strategy `local-steps`: the exchange of updates, through aggregators."""

from __future__ import annotations

from atoll.agent.runtime.strategy_interface.capabilities import WorkerContext, WorkerHalf
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import RETURNED, LocalSteps
from atoll.strategies.shared_params.exchange import ExchangeOptions, ExchangePace
from atoll.strategies.shared_params.update_exchange import UpdateExchange


def pace_of(settings: LocalSteps) -> ExchangePace:
    share, every = settings.density, settings.every
    at_shared_params = settings.gradients == "shared_params"
    return ExchangePace(
        1 - share / every, share, min(1.0, RETURNED * share), every, settings.staleness, at_shared_params
    )


def build(context: WorkerContext) -> WorkerHalf:
    """Build the worker half. Raises BadInput for what cannot be trained so."""
    settings = context.settings
    assert isinstance(settings, LocalSteps)
    options = ExchangeOptions(
        exchange="updates",
        values=settings.values,
        selection="threshold",
        digest_every=settings.digest_every,
        aggregators=True,
    )

    def pace(params: PlanParameters | None) -> ExchangePace:
        return pace_of(params.over_settings(settings) if isinstance(params, LocalStepsPlan) else settings)

    update = UpdateExchange(context, options, pace)
    return WorkerHalf(update, durable=update.state, measures=update.tally)
