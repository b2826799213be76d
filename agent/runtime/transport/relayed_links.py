"""Decides which workers of a run are reached through the relay alone, and gives the ports of this machine that lead
to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final

from atoll.v1.agents_pb2 import Member

HERE: Final = "127.0.0.1"


def relayed(one: Member, other: Member) -> bool:
    """Inside an island everyone dials everyone. Between islands one end that cannot be dialled is enough: who is behind
    the same gateway as the controller looks reachable and is not, from elsewhere."""
    return _island(one) != _island(other) and (one.behind_nat or other.behind_nat)


def _island(member: Member) -> str:
    return member.island or member.node


class RelayedLinks:
    """Of one worker in one view. Used by its training thread."""

    def __init__(self, members: Sequence[Member], own: int, open_port: Callable[[int, int, bool], int]) -> None:
        """members: by position in the view. own: this worker's position. open_port: from the number in the run, the
        port there and whether to seal, a port here; raises PeerLost."""
        self._members, self._own, self._open_port = members, own, open_port
        self.used = any(relayed(one, other) for one, other in combinations(members, 2))
        """Whether any link of the run is relayed: the same on all ranks."""
        self.ports: set[int] = set()
        """Of this machine, that lead to others."""

    def crosses(self, position: int) -> bool:
        """Whether this worker reaches that one through the relay."""
        return position < len(self._members) and relayed(self._members[self._own], self._members[position])

    def port(self, position: int, port: int, *, seal: bool) -> int:
        """A port of this machine that leads to `port` at that worker. seal: for what is not encrypted by itself.
        Raises PeerLost."""
        found = self._open_port(self._members[position].rank, port, seal)
        self.ports.add(found)
        return found

    def endpoint(self, position: int, tcp: str) -> str:
        """Where to dial what that worker said that it listens on ("tcp://HOST:PORT", encrypted by itself)."""
        if not self.crosses(position):
            return tcp
        return f"tcp://{HERE}:{self.port(position, int(tcp.rpartition(':')[2]), seal=False)}"

    def meeting(self, address: str, port: int) -> tuple[str, int]:
        """Where to dial the rendezvous that the first worker keeps at this address."""
        return (HERE, self.port(0, port, seal=True)) if self.crosses(0) else (address, port)
