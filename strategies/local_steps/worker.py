"""Strategy `local-steps`'s worker half: the exchange of updates, through owners."""

from __future__ import annotations

from atoll.agent.runtime.step.capabilities import WorkerContext, WorkerHalf
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.local_steps.plan import LocalStepsPlan
from atoll.strategies.local_steps.settings import RETURNED, LocalSteps
from atoll.strategies.shared_masters.options import Density, ExchangeOptions
from atoll.strategies.shared_masters.update_exchange import UpdateExchange


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

    def density(params: PlanParameters | None) -> Density:
        planned = params.density if isinstance(params, LocalStepsPlan) else None
        return density_of(settings.density if planned is None else planned)

    update = UpdateExchange(context, options, density)
    return WorkerHalf(update, durable=update.state, measures=update.tally)
