"""From a strategy's settings to what carries it out."""

from __future__ import annotations

import torch
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.synchronisation import Callbacks, Synchronisation, Synchronous
from atoll.strategies.dense.worker import DenseSynchroniser
from atoll.strategies.settings import StaleSparse


def build(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, agreed: Agreed
) -> Synchronisation:
    """agreed: what holds before the first pass. Raises BadInput for what the strategy cannot train."""
    if isinstance(session.strategy, StaleSparse):
        # Sockets and pipeline only where they are used.
        from atoll.strategies.stale_sparse.gradient_exchange import GradientExchange
        from atoll.strategies.stale_sparse.update_exchange import UpdateExchange

        exchange = UpdateExchange if session.strategy.exchange == "updates" else GradientExchange
        return exchange(session, session.strategy, model, optimizer, callbacks=callbacks, agreed=agreed)
    return DenseSynchroniser(model, session.group, callbacks, agreed) if session.group is not None else Synchronous()
