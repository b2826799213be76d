"""One end of a link for benchmarks/relay.py: `serve ADDRESS MODE` or `measure ADDRESS MODE SECONDS PINGS`.

MODE: "direct" for plain TCP between both ends, "relayed" through the relay at ADDRESS, "sealed" through it as what
torch's collectives send. The end that measures prints one line of JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab.lifeline import end_with_parent

from atoll.agent.runtime.checkpoints.memory.replication.sealing import Sealer
from atoll.agent.runtime.transport.keys import Keys
from atoll.agent.tunnels.sealed import PURPOSE, join_sealed
from atoll.host.ports import listening
from atoll.relay.client import call_relay, connected
from atoll.relay.handshake import Call, exactly, node_key, read_frame
from atoll.relay.server import keep_alive

SECRET = b"of this benchmark and nobody else"
WAIT_S = 20.0
PIECE = b"x" * (256 * 1024)
PING = b"p" * 64
# Of two ranks, for no secret: both ends derive them.
PRIVATE = [bytes([rank + 1]) * 32 for rank in range(2)]


def sealer(rank: int) -> Sealer:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    public = {
        r: X25519PrivateKey.from_private_bytes(one).public_key().public_bytes_raw() for r, one in enumerate(PRIVATE)
    }
    return Sealer(1, rank, Keys(secret=PRIVATE[rank], public=public[rank], of=public), PURPOSE)


def led(link: socket.socket, rank: int, mode: str, tasks: set[asyncio.Task[None]]) -> socket.socket:
    """The connection that a worker would have."""
    if mode != "sealed":
        return link
    worker, agent = socket.socketpair()
    for one in (worker, agent):
        one.setblocking(False)
    tasks.add(asyncio.create_task(join_sealed(agent, link, sealer(rank), 1 - rank)))
    return worker


async def handle(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    kind = await exactly(connection, 1)
    if kind == b"p":
        while len(ping := await loop.sock_recv(connection, len(PING))):
            await loop.sock_sendall(connection, ping)
    else:
        count, room = 0, bytearray(1 << 20)
        while taken := await loop.sock_recv_into(connection, room):
            count += taken
        await loop.sock_sendall(connection, count.to_bytes(8))
    connection.close()


async def serve(address: str, mode: str) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    host, _, port = address.rpartition(":")
    if mode == "direct":
        listener = listening(host, int(port))
        print("ready", flush=True)
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            keep_alive(connection, 10)
            tasks.add(asyncio.create_task(handle(connection)))
    standing = await call_relay(address, Call("b", "stand-by"), node_key(SECRET, "b"), WAIT_S)
    print("ready", flush=True)
    while True:
        link = (await read_frame(standing))["link"]
        answered = await call_relay(address, Call("b", "answer", link=link), node_key(SECRET, "b"), WAIT_S)
        tasks.add(asyncio.create_task(handle(led(answered, 1, mode, tasks))))


async def dialled(address: str, mode: str, tasks: set[asyncio.Task[None]]) -> socket.socket:
    host, _, port = address.rpartition(":")
    if mode == "direct":
        return await connected(host, int(port))
    return led(await call_relay(address, Call("a", "dial", to="b"), node_key(SECRET, "a"), WAIT_S), 0, mode, tasks)


async def measure(address: str, mode: str, seconds: float, pings: int) -> None:
    """Goodput counts from the first byte sent until the other end says that all has come."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    found: dict[str, object] = {"mode": mode}
    if seconds:
        link = await dialled(address, mode, tasks)
        await loop.sock_sendall(link, b"g")
        began_s, sent = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            await loop.sock_sendall(link, PIECE)
            sent += len(PIECE)
        link.shutdown(socket.SHUT_WR)
        assert int.from_bytes(await exactly(link, 8)) == sent
        found["mbit_s"] = 8e-6 * sent / (time.perf_counter() - began_s)
        link.close()
    if pings:
        link, took_s = await dialled(address, mode, tasks), []
        await loop.sock_sendall(link, b"p")
        for _ in range(pings):
            began_s = time.perf_counter()
            await loop.sock_sendall(link, PING)
            await exactly(link, len(PING))
            took_s.append(time.perf_counter() - began_s)
        took_s.sort()
        found["rtt_us"] = 1e6 * took_s[len(took_s) // 2]
        found["p99_us"] = 1e6 * took_s[len(took_s) * 99 // 100]
        link.close()
    print(json.dumps(found), flush=True)


def main() -> None:
    role, parent, address, mode, *numbers = sys.argv[1:]
    end_with_parent(int(parent))
    if role == "serve":
        asyncio.run(serve(address, mode))
    else:
        asyncio.run(measure(address, mode, float(numbers[0]), int(numbers[1])))


if __name__ == "__main__":
    main()
