"""CURVE: only the run's own ranks are admitted, and who is not, learns why."""

from __future__ import annotations

import threading

import pytest
import zmq
from wire_rig import RUN, Rank, connect_all, keys_of, wait_until
from zmq.utils import z85

from atoll.agent.runtime.transport.frames import Frame, Kind, encode
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.agent.runtime.transport.topology import Member, members_of
from atoll.agent.runtime.transport.transport import Transport
from atoll.errors import AtollError, BadInput, NotAllowed

APART = members_of(["a", "b"], ["x", "x"])
TOGETHER = members_of(["a", "a"], ["x", "x"])


def refusals(ranks: list[Rank]) -> dict[int, AtollError]:
    """Let all connect at once; who failed, and how."""
    endpoints = [rank.endpoint for rank in ranks]
    failed: dict[int, AtollError] = {}

    def connect(at: int) -> None:
        try:
            ranks[at].connect(endpoints)
        except AtollError as error:
            failed[at] = error

    threads = [threading.Thread(target=connect, args=(at,)) for at in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for rank in ranks:
        rank.close(linger_s=0)
    return failed


@pytest.mark.parametrize("members", [APART, TOGETHER], ids=["tcp", "ipc"])
def test_a_rank_with_a_key_of_its_own_making_is_refused_at_once(members: tuple[Member, ...]) -> None:
    keys = keys_of(2)
    secret, public = generate()
    stranger = Keys(secret, public, keys[0].of)
    failed = refusals([Rank(0, members, keys[0], deadline_s=20.0), Rank(1, members, stranger, deadline_s=20.0)])
    assert isinstance(failed[1], NotAllowed)
    assert "rank 0 on node a does not admit this rank's CURVE key" in str(failed[1])
    assert set(failed) == {0, 1}  # rank 0, whose peer is another than it was told, does not go on either


def test_a_server_with_another_key_than_was_told_is_not_spoken_to() -> None:
    keys = keys_of(2)
    told = {0: keys[0].public, 1: generate()[1]}
    deceived = Keys(keys[0].secret, keys[0].public, told)
    failed = refusals([Rank(0, APART, deceived, deadline_s=20.0), Rank(1, APART, keys[1], deadline_s=20.0)])
    assert "rank 1 on node b closed the connection during the handshake" in str(failed[0])
    assert "Were both given the keys of the same run?" in str(failed[0])


@pytest.mark.parametrize("secure", [0, 1])
def test_keys_on_one_side_only_are_an_error_that_says_so(secure: int) -> None:
    keys = keys_of(2)
    ranks = [Rank(at, APART, keys[at] if at == secure else None, deadline_s=20.0) for at in range(2)]
    failed = refusals(ranks)
    assert set(failed) == {0, 1}
    assert any(isinstance(error, NotAllowed) and "keys" in str(error) for error in failed.values()), failed


def test_a_stranger_is_not_admitted_and_is_counted() -> None:
    keys = keys_of(2)
    ranks = [Rank(at, APART, keys[at]) for at in range(2)]
    connect_all(ranks)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.ROUTING_ID, b"r9")
        secret, public = generate()
        client.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(keys[0].public))
        client.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(secret))
        client.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(public))
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        client.connect(ranks[0].endpoint.tcp)
        assert monitor.poll(30_000)
        monitor.close()
        assert ranks[0].transport.refused >= 1
        assert ranks[0].heard == []
    finally:
        context.destroy(linger=0)
        for rank in ranks:
            rank.close(linger_s=0)


def test_a_rank_cannot_take_the_name_of_another() -> None:
    """Rank 2 is admitted by its key, and opens a second connection that calls itself rank 1: nothing of it counts."""
    members = members_of(["a", "b", "c"], ["x", "y", "x"])  # 0 leads x, and 1 is no mate of 2
    keys = keys_of(3)
    ranks = [Rank(at, members, keys[at]) for at in range(3)]
    connect_all(ranks)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.ROUTING_ID, b"r7")
        client.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(keys[0].public))
        client.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys[2].secret))
        client.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys[2].public))
        client.connect(ranks[0].endpoint.tcp)
        client.send_multipart([encode(Frame(Kind.PART, RUN, 1, 1, 1, 2, 1, b"x")), b"x"])
        wait_until(lambda: ranks[0].transport.refused == 1)
        assert ranks[0].heard == []
    finally:
        context.destroy(linger=0)
        for rank in ranks:
            rank.close(linger_s=0)


def test_keys_that_cannot_be_are_refused_and_never_shown() -> None:
    secret, public = generate()
    assert secret.hex() not in repr(Keys(secret, public, {0: public}))
    assert repr(secret) not in repr(Keys(secret, public, {0: public}))
    with pytest.raises(BadInput, match="key secret has 31 bytes"):
        Keys(secret[:-1], public, {0: public})
    with pytest.raises(BadInput, match=r"key of\[1\] has 0 bytes"):
        Keys(secret, public, {0: public, 1: b""})
    with pytest.raises(BadInput, match="two ranks have the same public key"):
        Keys(secret, public, {0: public, 1: public})
    with pytest.raises(BadInput, match=r"no public key of rank 1; ranks \[0\] have one"):
        Transport(0, APART, run=RUN, keys=Keys(secret, public, {0: public}), host="127.0.0.1")
