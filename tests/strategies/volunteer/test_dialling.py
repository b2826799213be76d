"""How far ranks are, over real sockets with CURVE."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import zmq
from held_ports import free_port
from zmq.utils import z85

from atoll.agent.runtime.transport.keys import generate
from atoll.strategies.volunteer import dialling
from atoll.strategies.volunteer.dialling import PROBE_BYTES, measured, measuring
from atoll.strategies.volunteer.messages import Server, read, written
from atoll.strategies.volunteer.task_server import MOST_PROBES, TaskServer
from atoll.v1.agents_pb2 import Helping
from atoll.v1.common_pb2 import LinkSample

TICKET = b"t" * 32
NO_WORK: Any = None  # nobody asks for tasks


@contextmanager
def rank(context: zmq.Context[zmq.Socket[bytes]], number: int) -> Iterator[tuple[Server, TaskServer]]:
    """A task server that echoes until this ends."""
    secret, public = generate()
    with context.socket(zmq.ROUTER) as socket:
        socket.curve_server, socket.curve_secretkey = True, z85.encode(secret)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        server = TaskServer(
            socket, NO_WORK, recognises=lambda name, shown: shown == TICKET.hex(), tell=lambda what, wrong: None
        )
        closing = threading.Event()

        def serve() -> None:
            while not closing.is_set():
                if socket.poll(10):
                    server.receive()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Server(number, "127.0.0.1", port, public.hex()), server
        finally:
            closing.set()
            thread.join()


def helping(server: Server) -> Helping:
    public_key = bytes.fromhex(server.public_key)
    return Helping(name="v/0", ticket=TICKET, address=server.address, port=server.port, public_key=public_key)


def test_links_to_all_ranks_are_measured_and_who_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The rank that is helped says who the others are. 2. Two ranks answer; a third has another key than was said;
    the fourth is not there."""
    monkeypatch.setattr(dialling, "ANSWER_S", 4.0)  # for others may have the processors
    monkeypatch.setattr(dialling, "MEASURE_S", 60.0)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        ranks = [stack.enter_context(rank(context, number)) for number in range(3)]
        servers = [one for one, _ in ranks]
        servers[2] = servers[2]._replace(public_key=generate()[1].hex())
        servers.append(Server(3, "127.0.0.1", free_port(), generate()[1].hex()))
        ranks[0][1].servers = servers
        found = measured(context, helping(servers[0]))
    assert sorted(one.peer for one in found) == [0, 1]
    assert all(0 < one.busy_s < 5 and one.sent_bytes == one.received_bytes == PROBE_BYTES for one in found)


def test_links_are_measured_again_while_tasks_are_done_and_that_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Meanwhile two measurements come. 2. The rank that is asked answers no more: who wants to end does not wait for
    it."""
    monkeypatch.setattr(dialling, "PAUSES_S", (0.0, 0.01, 0.0))
    monkeypatch.setattr(dialling, "MEASURE_S", 600.0)
    monkeypatch.setattr(dialling, "ANSWER_S", 30.0)
    told: queue.SimpleQueue[list[LinkSample]] = queue.SimpleQueue()
    with zmq.Context() as context, ExitStack() as stack:
        with rank(context, 0) as (only, server):
            server.servers = [only, only._replace(rank=1)]
            stack.enter_context(measuring(context, helping(only), told.put))
            for _ in range(2):
                assert sorted(one.peer for one in told.get(timeout=60)) == [0, 1]
        stack.close()
    assert "edges" not in [thread.name for thread in threading.enumerate()]


def test_there_is_nothing_to_measure_where_there_is_no_choice() -> None:
    with zmq.Context() as context, rank(context, 0) as (only, server):
        server.servers = [only]
        assert measured(context, helping(only)) == []


@pytest.mark.parametrize(("ticket", "size"), [("00", PROBE_BYTES), (TICKET.hex(), 4 * PROBE_BYTES)])
def test_nobody_else_is_echoed_nor_more_than_a_probe(ticket: str, size: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as line:
        router.bind("inproc://probed")
        told: list[str] = []
        server = TaskServer(
            router,
            NO_WORK,
            recognises=lambda name, shown: shown == TICKET.hex(),
            tell=lambda what, wrong: told.append(what),
        )
        line.connect("inproc://probed")
        probe = {"kind": "probe", "name": "v/0", "ticket": ticket}
        line.send_multipart(written(probe, [torch.zeros(size, dtype=torch.uint8)]))
        server.receive()
        assert told
        answers = [read(line.recv_multipart())[0]["kind"]] if line.poll(0) else []
        assert answers == (["out"] if ticket == "00" else [])
        for _ in range(MOST_PROBES + 10):
            line.send_multipart(written({**probe, "ticket": TICKET.hex()}, []))
            server.receive()
        echoed = 0
        while line.poll(0):
            echoed += read(line.recv_multipart())[0]["kind"] == "echo"
        assert 0 < echoed <= MOST_PROBES
