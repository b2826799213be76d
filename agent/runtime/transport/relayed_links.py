"""Decides which workers of a run are reached through the relay alone, and gives the ports of this machine that lead
to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Final

from atoll.v1.agents_pb2 import Member

HERE: Final = "127.0.0.1"


def relayed(one: Member, other: Member) -> bool:
    """Return True if two members connect through the relay. Inside an island all dial directly. Between islands one
    end behind NAT is enough: a node behind the controller's own gateway looks reachable and is not, from
    elsewhere."""
    return _island(one) != _island(other) and (one.behind_nat or other.behind_nat)


def _island(member: Member) -> str:
    return member.island or member.node


class RelayedLinks:
    """Relayed links of one worker in one view. Used by its training thread."""

    def __init__(self, members: Sequence[Member], own: int, open_port: Callable[[int, int, bool], int]) -> None:
        """members: by position in the view. own: this worker's position. open_port: from the number in the run, the
        port there and whether to seal, a port here; raises PeerLost."""
        self._members, self._own, self._open_port = members, own, open_port
        self.used = any(relayed(one, other) for one, other in combinations(members, 2))
        """Whether any link of the run is relayed: the same on all ranks."""
        self.ports: set[int] = set()
        """Of this machine, that lead to others."""

    def crosses(self, position: int) -> bool:
        """Return True if this worker reaches that one through the relay."""
        return position < len(self._members) and relayed(self._members[self._own], self._members[position])

    def port(self, position: int, port: int, *, seal: bool) -> int:
        """A port of this machine that leads to `port` at that worker. seal: for what is not encrypted by itself.
        Raises PeerLost."""
        found = self._open_port(self._members[position].rank, port, seal)
        self.ports.add(found)
        return found

    def endpoint(self, position: int, tcp: str) -> str:
        """Return where to dial another worker's listener ("tcp://HOST:PORT", which encrypts by itself)."""
        if not self.crosses(position):
            return tcp
        return f"tcp://{HERE}:{self.port(position, int(tcp.rpartition(':')[2]), seal=False)}"

    def meeting(self, address: str, port: int) -> tuple[str, int]:
        """Return where to dial the rendezvous of the first worker at this address."""
        return (HERE, self.port(0, port, seal=True)) if self.crosses(0) else (address, port)
