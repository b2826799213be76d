"""From a strategy's settings to what carries it out."""

from __future__ import annotations

import torch
from torch import nn

from atoll.agent.runtime.control import Agreed
from atoll.agent.runtime.dense import DenseSynchroniser
from atoll.agent.runtime.session import Session
from atoll.agent.runtime.strategy import StaleSparse
from atoll.agent.runtime.synchronisation import Callbacks, Synchronisation, Synchronous


def build(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, agreed: Agreed
) -> Synchronisation:
    """agreed: what holds before the first pass. Raises BadInput for what the strategy cannot train."""
    if isinstance(session.strategy, StaleSparse):
        # Sockets and pipeline only where they are used.
        from atoll.agent.runtime.stale.gradient_exchange import GradientExchange
        from atoll.agent.runtime.stale.update_exchange import UpdateExchange

        exchange = UpdateExchange if session.strategy.exchange == "updates" else GradientExchange
        return exchange(session, session.strategy, model, optimizer, callbacks=callbacks, agreed=agreed)
    return DenseSynchroniser(model, session.group, callbacks, agreed) if session.group is not None else Synchronous()
