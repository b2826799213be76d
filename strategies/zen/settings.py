"""Settings of strategy `zen`."""

from __future__ import annotations

from typing import Literal

from atoll.strategies.declaration import StrategySettings


class Zen(StrategySettings):
    """Every step sums whole gradients exactly; of those that are sparse the non-zeros alone travel."""

    scheme: Literal["auto", "allreduce", "agsparse", "sparcml", "sparse-ps", "omnireduce", "zen"] = "auto"
    """scheme that sums sparse gradients: `zen` splits them by hashing, each worker sums a partition; the others are the
    published schemes that it is compared with; `auto`: for each tensor the one that planner `sparse-scheme` finds
    cheapest by measured densities and links"""
