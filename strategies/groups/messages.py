"""Messages between replicas and the scheduler of strategy `groups`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import Declared

Count = Annotated[int, Field(ge=0, lt=2**32)]


class GroupsMessage(Declared):
    """Message of a replica or the scheduler. A replica's `signal` says that it is ready, `done` that it trains
    nothing more in this round. The scheduler's `group` and `members` answer a signal, `waits` a repeated one
    without an answer yet; `lost` tells a replica that the others continue without it. Ranks are of the view."""

    view: Annotated[int, Field(ge=0, lt=2**24)] = 0
    """view of the run: rounds, signals and ranks restart in each one"""

    rank: Count = 0
    """rank of the sender"""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """workers of the view, with the sender; 0 in answers"""

    round: Annotated[int, Field(ge=0, lt=2**63)] = 0
    signal: Count = 0
    """signal of the replica that sent it or is answered, rising from 1 over all rounds; 0: none"""

    done: bool = False
    ended: list[Count] = Field(default_factory=list, max_length=1024)
    """ranks that train nothing more: the sender lost them"""

    waits: bool = False
    lost: bool = False
    group: Count = 0
    """number of the group in the round, from 1"""

    members: list[Count] = Field(default_factory=list, max_length=1024)
    """ranks, ascending"""

    signals: list[Count] = Field(default_factory=list, max_length=1024)
    """answered signal of each member"""
