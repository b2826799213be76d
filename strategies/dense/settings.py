"""Settings of strategy `dense`."""

from __future__ import annotations

from atoll.strategies.declaration import StrategySettings


class Dense(StrategySettings):
    """Every step all-reduces whole gradients; the optimizer is torch's own."""
