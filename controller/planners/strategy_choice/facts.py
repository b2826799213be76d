"""Input of planner `strategy`: measured islands and links, facts of the model, and the strategies to choose from."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from atoll.planning.schemas import MAX_NODES, Name, Schema, Seconds, Share, TotalBatch, Uncertainty

BitsPerSecond = Annotated[float, Field(ge=1, le=1e16)]
StepSeconds = Annotated[float, Field(gt=0, le=1e6)]
StepsForOne = Annotated[int | float, Field(gt=0, le=1e6)]

ExchangeKind: TypeAlias = Literal["gradients", "compressed-gradients", "nonzeros", "updates", "differences"]
"""Traffic of workers: whole gradients by a ring; compressed ones; those entries of gradients that are not zero; the
largest entries of each rank's update while the next step runs; an island's differences from shared parameters."""


class RankTimes(Schema):
    """compute_s: seconds of a step at the rank's share of the batch, without waiting. batch: that share, in samples."""

    compute_s: StepSeconds
    batch: TotalBatch = 1


class MeasuredIsland(Schema):
    """bandwidth_bps, rtt_s: of a link between two of its ranks; without a bandwidth the link counts as fast."""

    name: Name
    ranks: Annotated[tuple[RankTimes, ...], Field(min_length=1, max_length=MAX_NODES)]
    bandwidth_bps: BitsPerSecond | None = None
    rtt_s: Seconds = 0.0


class IslandLink(Schema):
    """A directed link. A pair of which one direction was measured has it in both."""

    source: Name
    target: Name
    bandwidth_bps: BitsPerSecond
    rtt_s: Seconds = 0.0


class StrategyCandidate(Schema):
    """A strategy. exchange: what its workers exchange, with so many bytes a value and this share of the values in a
    step. steps: of it that teach what one step of whole gradients does, with the least and the most that was measured.
    refused: why it cannot train this script; empty if it can."""

    name: Name
    exchange: ExchangeKind
    value_bytes: Annotated[int | float, Field(gt=0, le=8)] = 4
    density: Annotated[int | float, Field(gt=0, le=1)] = 1
    steps: StepsForOne = 1.0
    least_steps: StepsForOne | None = None
    most_steps: StepsForOne | None = None
    refused: Annotated[str, Field(max_length=4096)] = ""


class MeasuredStep(Schema):
    """Seconds of a step in which a strategy trained this job over these links."""

    strategy: Name
    step_s: StepSeconds


class StrategyInput(Schema):
    """links: between islands; none if nothing was measured. entries: number of the model's parameters.
    gradient_density: share of a rank's gradient that is not zero; 1 if not known. summed_density: the same of the sum
    of all ranks' gradients; left out, ranks are taken to have no entry in common. candidates: in order of preference.
    running: the strategy that trains now; it is left for a clear gain only. measured: steps that replace predictions.
    uncertainty: of the computing times and the links."""

    islands: Annotated[tuple[MeasuredIsland, ...], Field(min_length=1, max_length=MAX_NODES)]
    links: Annotated[tuple[IslandLink, ...], Field(max_length=MAX_NODES)]
    entries: TotalBatch
    gradient_density: Share = 1.0
    summed_density: Share | None = None
    candidates: Annotated[tuple[StrategyCandidate, ...], Field(min_length=1, max_length=256)]
    running: Annotated[str, Field(max_length=256)] = ""
    measured: Annotated[tuple[MeasuredStep, ...], Field(max_length=256)] = ()
    uncertainty: Uncertainty = 0.0

    @model_validator(mode="after")
    def _names_islands(self) -> Self:
        names = [island.name for island in self.islands]
        if len(set(names)) < len(names):
            raise ValueError(f"islands has a name twice: {', '.join(names)}. Give each island its own name")
        for index, link in enumerate(self.links):
            for field, name in (("source", link.source), ("target", link.target)):
                if name not in names:
                    raise ValueError(f"links[{index}].{field} = {name!r} is none of islands: {', '.join(names)}")
        return self
