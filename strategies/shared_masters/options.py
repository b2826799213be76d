"""Options that a strategy sets for the exchange that its ranks share masters by."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.kernels.block_coo import Values
from atoll.kernels.exchange_engine import Exchange, Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """For the whole run."""

    exchange: Exchange
    values: Values
    selection: Selection
    staleness: int  # sync rounds that a forward pass may begin without
    digest_every: int  # sync rounds
    error_feedback: bool = False  # exchanging gradients; of updates it is in the live weights
    owners: bool = False
    """An island is one replica. Each layer's sums go to the island that owns it, and its total comes from there."""

    every: int = 1  # a layer is exchanged in each so-many-th sync round


@dataclass(frozen=True, slots=True)
class Density:
    """How much is sent in a sync round."""

    sparsity: float  # as it is told: the share that all ranks together leave out
    sent: float  # the share of its blocks that a rank sends of a layer
    returned: float = 1.0  # the share that a layer's owner sends back
