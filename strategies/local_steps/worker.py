"""Strategy `local-steps`'s worker half: the exchange of updates, through owners."""

from __future__ import annotations

from typing import Final

from atoll.agent.runtime.step.capabilities import WorkerContext, WorkerHalf
from atoll.strategies.local_steps.settings import LocalSteps
from atoll.strategies.shared_masters.options import Density, ExchangeOptions
from atoll.strategies.shared_masters.update_exchange import UpdateExchange

RETURNED: Final = 2.0
"""Blocks that an owner sends back for one that an island sends: islands send different ones (docs/performance.md)."""


def density_of(share: float) -> Density:
    return Density(1 - share, share, min(1.0, RETURNED * share))


def build(context: WorkerContext) -> WorkerHalf:
    """Raises BadInput for what cannot be trained so."""
    settings = context.settings
    assert isinstance(settings, LocalSteps)
    options = ExchangeOptions(
        exchange="updates",
        values=settings.values,
        selection="threshold",
        staleness=settings.staleness,
        digest_every=settings.digest_every,
        owners=True,
        every=settings.every,
    )

    density = density_of(settings.density)
    update = UpdateExchange(context, options, lambda _: density)
    return WorkerHalf(update, durable=update.state, measures=update.tally)
