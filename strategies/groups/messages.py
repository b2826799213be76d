"""Messages between replicas and the scheduler of strategy `groups`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atoll.strategies.declaration import Declared

Count = Annotated[int, Field(ge=0, lt=2**32)]


class GroupsMessage(Declared):
    """Of a replica: `signal` says that it is ready, `done` that it trains nothing more in this round. Of the scheduler:
    `group` and `members` answer a signal, `waits` a repeated one that has no answer yet."""

    round: Annotated[int, Field(ge=0, lt=2**63)] = 0
    signal: Count = 0
    """of the replica that sent or that is answered, rising from 1 over all rounds; 0: none"""

    done: bool = False
    ended: list[Count] = Field(default_factory=list, max_length=1024)
    """with `signal`: ranks that are known to be done, for what they said of it may be lost"""

    waits: bool = False
    group: Count = 0
    """its number in the round, from 1"""

    members: list[Count] = Field(default_factory=list, max_length=1024)
    """ranks, ascending"""

    signals: list[Count] = Field(default_factory=list, max_length=1024)
    """of each member, the one that is answered"""
