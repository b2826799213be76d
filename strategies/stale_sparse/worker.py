"""Worker half of strategy `stale-sparse`: it exchanges updates, or gradients as published."""

from __future__ import annotations

from atoll.agent.runtime.strategy_interface.capabilities import WorkerContext, WorkerHalf
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.shared_params.exchange import ExchangeOptions, ExchangePace
from atoll.strategies.shared_params.local_update import SharedParamsUpdate
from atoll.strategies.shared_params.update_exchange import UpdateExchange
from atoll.strategies.stale_sparse.gradient_exchange import GradientExchange
from atoll.strategies.stale_sparse.plan import StaleSparsePlan
from atoll.strategies.stale_sparse.settings import StaleSparse


def pace_of(sparsity: float, ranks: int, staleness: int = 1) -> ExchangePace:
    """Return the pace: ranks divide what is sent (StellaTrain, section 6). With nothing left out each sends all."""
    return ExchangePace(sparsity, (1 - sparsity) / ranks if sparsity > 0 else 1.0, staleness=staleness)


def build(context: WorkerContext) -> WorkerHalf:
    """Build the worker half. Raises BadInput for what cannot be trained so."""
    settings, ranks = context.settings, context.session.place.world_size
    assert isinstance(settings, StaleSparse)
    options = ExchangeOptions(
        exchange=settings.exchange,
        values=settings.values,
        selection=settings.selection,
        digest_every=settings.digest_every,
        error_feedback=settings.error_feedback and settings.exchange == "gradients",
    )

    def pace(params: PlanParameters | None) -> ExchangePace:
        planned = params.sparsity if isinstance(params, StaleSparsePlan) else None
        return pace_of(settings.sparsity if planned is None else planned, ranks, settings.staleness)

    update: SharedParamsUpdate
    if settings.exchange == "updates":
        update = UpdateExchange(context, options, pace)
    else:
        update = GradientExchange(context, settings, options, pace)
    return WorkerHalf(update, durable=update.state, measures=update.tally)
