"""Settings of strategy `zen`."""

from __future__ import annotations

from typing import Literal

from atoll.strategies.declaration import StrategySettings


class Zen(StrategySettings):
    """Every step sums whole gradients exactly; of those that are sparse the non-zeros alone travel."""

    scheme: Literal["auto", "allreduce", "agsparse", "sparcml", "sparse-ps", "omnireduce", "zen"] = "auto"
    """Sum sparse gradients by this scheme. `zen` splits them by hashing, and each worker sums a partition. The others
    are the published schemes that it is compared with. `auto` takes for each tensor the scheme that planner
    `sparse-scheme` finds cheapest by measured densities and links."""
