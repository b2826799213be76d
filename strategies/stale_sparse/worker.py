"""Strategy `stale-sparse`'s worker half: what travels is updates, or gradients as published."""

from __future__ import annotations

from atoll.agent.runtime.step.capabilities import WorkerContext, WorkerHalf
from atoll.strategies.stale_sparse.gradient_exchange import GradientExchange
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.update_exchange import UpdateExchange


def build(context: WorkerContext) -> WorkerHalf:
    """Raises BadInput for what cannot be trained so."""
    settings = context.settings
    assert isinstance(settings, StaleSparse)
    update = (UpdateExchange if settings.exchange == "updates" else GradientExchange)(context, settings)
    return WorkerHalf(update, durable=update.state, measures=update.tally)
