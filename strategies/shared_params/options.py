"""Options that a strategy sets for the exchange of its ranks with shared parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from atoll.kernels.exchange_engine import Exchange, Selection, Values

MOST_STALENESS: Final = 15
"""Largest staleness, in sync rounds. It also bounds messages received ahead and proposals that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """Options that are fixed for the whole run."""

    exchange: Exchange
    values: Values
    selection: Selection
    digest_every: int  # sync rounds
    error_feedback: bool = False  # exchanging gradients; of updates it is in the live weights
    aggregators: bool = False
    """True: an island is one replica. It sends each layer's sums to the layer's aggregator, which returns the total."""


@dataclass(frozen=True, slots=True)
class ExchangePace:
    """Amount that is sent in a sync round, how often, and how late it may come. A plan may change it."""

    sparsity: float  # as reported: the share that all ranks together leave out
    sent: float  # the share of its blocks that a rank sends of a layer
    returned: float = 1.0  # the share that a layer's aggregator sends back
    every: int = 1  # a layer is exchanged in each so-many-th sync round
    staleness: int = 1  # sync rounds that a forward pass may begin without
    at_shared_params: bool = False  # exchanging updates: forward and backward passes are at the shared parameters
