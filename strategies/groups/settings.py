"""StrategySettings of strategy `groups`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.strategies.declaration import StrategySettings


class Groups(StrategySettings):
    """Local updates, averaged in groups of replicas that are ready at the same time; all together at a round's end."""

    stages: Annotated[int, Field(ge=1, le=256)] = 1
    """parts that the model is cut into: so many workers are a pipeline and hold it together, and the job's workers are
    a multiple of it"""

    grouping: Literal["scheduled", "all", "pairs", "static"] = "scheduled"
    """rule of who averages after a local update: `scheduled` replicas that are ready in the same window (SDPipe);
    for comparison `all` (all-reduce in every iteration), `pairs` (each with a random partner, AD-PSGD), `static`
    (fixed groups)"""

    window_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """longest wait of a ready replica for others with `scheduled`, but where groups must connect, in seconds; 0: an
    iteration's time divided by the number of replicas"""

    history: Annotated[int, Field(ge=1, le=1000)] = 10
    """number of consecutive groups that connect all replicas, with `scheduled`"""

    group_size: Annotated[int, Field(ge=2, le=1024)] = 2
    """replicas of a group, with `static`"""

    thin_links: Literal["float32", "bfloat16", "int8"] = "float32"
    """the form in which float32 activations and their gradients travel between stages on different islands: rounding
    makes them 2 or 3.8 times smaller, and losses are not those of one process any more"""

    @property
    def overlaps(self) -> bool:
        """Return True if averages run beside the passes of the next batch; not in `all`, which is exact."""
        return self.grouping != "all"

    @property
    def stages_of_model(self) -> int:
        return self.stages
