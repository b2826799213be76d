"""Messages between replicas and the scheduler of strategy `groups`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import Declared

Count = Annotated[int, Field(ge=0, lt=2**32)]


class GroupsMessage(Declared):
    """Of a replica: `signal` says that it is ready, `done` that it trains nothing more in this round. Of the scheduler:
    `group` and `members` answer a signal, `waits` a repeated one that has no answer yet; `lost` tells a replica that
    the others go on without it. Ranks are of the view."""

    view: Annotated[int, Field(ge=0, lt=2**24)] = 0
    """of the run: in each one rounds, signals and ranks begin anew"""

    rank: Count = 0
    """of who sent it"""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """of the view, with who sent it; 0 in answers"""

    round: Annotated[int, Field(ge=0, lt=2**63)] = 0
    signal: Count = 0
    """of the replica that sent or that is answered, rising from 1 over all rounds; 0: none"""

    done: bool = False
    ended: list[Count] = Field(default_factory=list, max_length=1024)
    """ranks that train nothing more: the sender lost them"""

    waits: bool = False
    lost: bool = False
    group: Count = 0
    """its number in the round, from 1"""

    members: list[Count] = Field(default_factory=list, max_length=1024)
    """ranks, ascending"""

    signals: list[Count] = Field(default_factory=list, max_length=1024)
    """of each member, the one that is answered"""
