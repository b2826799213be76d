"""Which links go through the relay, and what gloo is told of the workers at their other ends."""

from __future__ import annotations

import gc
import struct

import pytest
import torch
import torch.distributed as dist

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.transport.gloo_addresses import GlooAddress
from atoll.agent.runtime.transport.meeting import _made
from atoll.agent.runtime.transport.relayed_links import RelayedLinks, relayed
from atoll.v1.agents_pb2 import Member

HOME = Member(rank=0, node="home", island="home", behind_nat=True)
SECOND = Member(rank=3, node="home-2", island="home", behind_nat=True)
LAB = Member(rank=1, node="lab", island="lab")
CLOUD = Member(rank=2, node="cloud", island="cloud")


def value(family: int, port: int, address: bytes, host: bytes = b"box") -> bytes:
    """As gloo puts it (Rank::bytes in transport/tcp/context.cc)."""
    gap = b"" if family == 2 else b"\0" * 4
    storage = (struct.pack("=H", family) + struct.pack("!H", port) + gap + address).ljust(128, b"\0")
    body = storage + struct.pack("=q", -1)
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(body)) + body + struct.pack("=qq", 0, 1)


def test_a_link_is_relayed_between_islands_where_one_end_cannot_be_dialled() -> None:
    assert relayed(HOME, LAB)
    assert relayed(CLOUD, HOME)
    assert not relayed(LAB, CLOUD)
    assert not relayed(HOME, SECOND)
    assert relayed(Member(node="x", behind_nat=True), Member(node="y"))  # without islands each node is its own


def test_only_relayed_ends_get_ports_and_all_ranks_know_whether_any_is() -> None:
    asked: list[tuple[int, int, bool]] = []

    def opened(rank: int, port: int, seal: bool) -> int:
        asked.append((rank, port, seal))
        return 40_000 + rank

    members = (HOME, LAB, CLOUD, SECOND)
    lab, home = RelayedLinks(members, 1, opened), RelayedLinks(members, 0, opened)
    assert lab.used
    assert home.used
    assert not RelayedLinks((LAB, CLOUD), 0, opened).used
    assert lab.endpoint(2, "tcp://10.0.0.2:5") == "tcp://10.0.0.2:5"
    assert lab.endpoint(3, "tcp://[fd00::1]:77") == "tcp://127.0.0.1:40003"
    assert lab.meeting("192.168.1.5", 29500) == ("127.0.0.1", 40_000)
    assert home.meeting("192.168.1.5", 29500) == ("192.168.1.5", 29500)  # its own
    assert asked == [(3, 77, False), (0, 29500, True)]
    assert lab.ports == {40_003, 40_000}


@pytest.mark.parametrize(("family", "size"), [(2, 4), (10, 16)])
def test_of_two_ranks_the_higher_dials_and_the_lower_never_does(family: int, size: int) -> None:
    """gloo lets the one with the higher address dial: compared byte by byte."""
    own = b"\x0a" * size
    said = GlooAddress.parse(value(family, 5000, own))
    assert said is not None
    assert bytes(said) == value(family, 5000, own)
    start = 4 if family == 2 else 8
    seen = said.dialled_at(40_001)
    assert seen.address[start : start + size] == b"\0" * size < own
    assert struct.unpack_from("!H", seen.address, 2) == (40_001,)
    assert said.never_dialled().address[start : start + size] == b"\xff" * size > own
    again = GlooAddress.parse(bytes(seen))
    assert again == seen


def test_a_value_carries_the_number_of_its_rank_and_its_host_comes_back() -> None:
    said = GlooAddress.parse(value(2, 5000, b"\x0a" * 4))
    assert said is not None
    tagged = GlooAddress.parse(bytes(said.tagged(17)))
    assert tagged is not None
    assert (tagged.rank, tagged.host) == (17, b"box")
    assert bytes(tagged.tagged(-1)) == value(2, 5000, b"\x0a" * 4)


@pytest.mark.parametrize("other", [b"", b"1", b"\0" * 8, b"\xff" * 64, value(2, 1, b"abcd")[:-1], value(7, 1, b"abcd")])
def test_what_is_no_address_is_left_alone(other: bytes) -> None:
    assert GlooAddress.parse(other) is None


def test_parts_of_a_relayed_group_meet_long_after_its_rendezvous() -> None:
    """1. A run over the relay meets at a store that is written in Python. 2. The rendezvous is over, and torch keeps
    the C++ half of that store alone. 3. The workers of an island meet: torch called a method that was gone."""
    links = RelayedLinks((HOME, LAB), 0, lambda rank, port, seal: 40_000 + rank)
    place = WorkerPlace(0, 1, 0, 1, "127.0.0.1", None)
    group = _made(place, torch.device("cpu"), dist.HashStore(), 20.0, abortable=False, links=links)
    try:
        gc.collect()
        assert group.parted([[0]], 20.0).gather_bytes(b"here") == [b"here"]
    finally:
        assert group.close_within(20)
