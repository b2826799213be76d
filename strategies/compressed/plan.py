"""Parameters that a plan gives strategy `compressed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from atoll.strategies.compressed.groups.options import TensorGroup, named
from atoll.strategies.declaration import PlanParameters

_Pair = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


class CompressedPlan(PlanParameters):
    """Groups of tensors and their ways, valid from the plan's first step on all workers."""

    ways: list[str] | None = None
    """Ways to synchronise, which `groups` name by their places here."""

    groups: list[_Pair] | None = None
    """Number of tensors and place of their way, of each group, in the order of the backward pass."""

    @model_validator(mode="after")
    def _belong_together(self) -> CompressedPlan:
        if (self.ways is None) != (self.groups is None):
            raise ValueError("has ways without groups, or groups without ways")
        for way in self.ways or ():
            named(way)
        if any(count == 0 or way >= len(self.ways or ()) for count, way in self.groups or ()):
            raise ValueError("has an empty group, or one whose way is not there")
        return self

    @classmethod
    def of(cls, groups: Sequence[TensorGroup]) -> CompressedPlan:
        ways = sorted({group.way.name for group in groups})
        return cls(ways=ways, groups=[[group.end - group.begin, ways.index(group.way.name)] for group in groups])

    def as_groups(self) -> list[TensorGroup] | None:
        """Return the groups; None if the plan has none."""
        if self.ways is None or self.groups is None:
            return None
        found, begin = [], 0
        for count, way in self.groups:
            found.append(TensorGroup(begin, begin + count, named(self.ways[way])))
            begin += count
        return found
