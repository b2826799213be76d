"""Settings of strategy `groups`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.strategies.declaration import StrategySettings


class Groups(StrategySettings):
    """Local updates, averaged in groups of replicas that are ready at the same time; all together at a round's end."""

    stages: Annotated[int, Field(ge=1, le=256)] = 1
    """Cut the model into N parts. N workers form a pipeline, and the job's workers are a multiple of N."""

    grouping: Literal["scheduled", "all", "pairs", "static"] = "scheduled"
    """Average after a local update by this rule. `scheduled` averages replicas that are ready in the same window
    (SDPipe). For comparison: `all` all-reduces in every iteration, `pairs` takes a random partner (AD-PSGD), `static`
    has fixed groups."""

    window_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Let a ready replica wait for others at most this long, in seconds, with `scheduled`. It waits longer only where
    groups must connect all replicas. 0 is an iteration's time divided by the number of replicas."""

    history: Annotated[int, Field(ge=1, le=1000)] = 10
    """Connect all replicas within N consecutive groups, with `scheduled`."""

    group_size: Annotated[int, Field(ge=2, le=1024)] = 2
    """Put N replicas into a group, with `static`."""

    thin_links: Literal["float32", "bfloat16", "int8"] = "float32"
    """Send float32 activations and their gradients in this form between stages on different islands. `bfloat16` makes
    them 2 times smaller and `int8` 3.8 times; losses then differ from those of one process."""

    @property
    def overlaps(self) -> bool:
        """Return True if averages run beside the passes of the next batch; not in `all`, which is exact."""
        return self.grouping != "all"

    @property
    def stages_of_model(self) -> int:
        return self.stages
