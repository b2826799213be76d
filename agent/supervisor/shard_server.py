"""Serves the shards of a job that lie on this machine to workers of a run that it has no part in.

They ask over ZeroMQ with CURVE: this agent's key is made when it starts and told to the controller with the address, so
that a launch can name both; whom it answers the controller says, by the public keys of the run's ranks. Each sees its
own job's shards and nothing else, and of a job only the newest run is answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import zmq
from google.protobuf.message import DecodeError

from atoll.agent.ports import candidate_ports
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_folders import ALL_SLOTS, ShardFolders, place_of
from atoll.agent.runtime.transport.keys import Gatekeeper, Keys, generate, secure_server
from atoll.errors import CheckpointError
from atoll.host.ports import bracketed
from atoll.network.message_limits import MAX_SHARD_PIECE
from atoll.v1.worker_pb2 import ShardReply, ShardRequest

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
_END_S: Final = 5.0
_REQUEST_BYTES: Final = 1024
_WAITING: Final = 64  # answers, of each connection
_MAX_WORDS: Final = 300
_TRIES: Final = 200


class ShardServer:
    """`listen` and `allow` on the agent's event loop; a thread of its own answers."""

    def __init__(self, folders_of: Callable[[str], ShardFolders]) -> None:
        """folders_of: by job."""
        self._folders_of = folders_of
        secret, self.public_key = generate()
        self._keys = Keys(secret=secret, public=self.public_key, of={})
        self._allowed: dict[str, tuple[int, frozenset[bytes]]] = {}  # by job: run, its ranks' public keys
        self._address = ""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.port = 0
        """Where it listens; 0: nowhere."""

    def listen(self, address: str) -> None:
        """At this address of the machine, from now on. Where no port is free there, it says so and listens nowhere."""
        if address == self._address:
            return
        self.close()
        self._address, self._stop = address, threading.Event()
        context = zmq.Context()
        gate, socket = Gatekeeper(context, self._job_of), context.socket(zmq.ROUTER)
        secure_server(socket, self._keys)
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, _REQUEST_BYTES), (zmq.SNDHWM, _WAITING)):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.IPV6, ":" in address)
        self.port = _bound(socket, address)
        if not self.port:
            logger.warning("shards in memory are served to nobody: no port of %s is free", address)
            context.destroy(linger=0)
            return
        self._thread = threading.Thread(
            target=self._serve, args=(context, gate, socket, self._stop), name="shard server", daemon=True
        )
        self._thread.start()

    def allow(self, job: str, run: int, public: Sequence[bytes]) -> None:
        """Answer the ranks of this run, and none of an older one. Whoever of it is connected already stays so: an
        older run's worker may read what the newer one reads."""
        if run >= self._allowed.get(job, (0, None))[0]:
            self._allowed[job] = (run, frozenset(public))

    def drop(self, job: str) -> None:
        """Nobody will ask for it again."""
        self._allowed.pop(job, None)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_END_S)
            self._thread = None
        self._address, self.port = "", 0

    def _serve(
        self, context: zmq.Context[zmq.Socket[bytes]], gate: Gatekeeper, socket: zmq.Socket[bytes],
        stop: threading.Event,
    ) -> None:  # fmt: skip
        poller = zmq.Poller()
        poller.register(gate.socket, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        try:
            while not stop.is_set():
                ready = dict(poller.poll(int(1000 * _LOOK_S)))
                if gate.socket in ready:
                    gate.answer()
                if socket in ready:
                    self._answer(socket)
        except Exception:
            logger.exception("the shard server ended")
        finally:
            context.destroy(linger=0)

    def _job_of(self, key: bytes) -> str | None:
        return next((job for job, (_, keys) in list(self._allowed.items()) if key in keys), None)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        try:
            who, *parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return  # its connection is gone
        job, reply = str(parts[-1].get("User-Id")) if parts else "", ShardReply()
        try:
            asked = ShardRequest.FromString(bytes(parts[-1].buffer)) if len(parts) == 1 else ShardRequest()
            folders = self._folders_of(job)
            if asked.bytes:
                reply.data = piece_of(folders, asked)
            else:
                reply.held.extend(held_in(folders))
        except (CheckpointError, DecodeError, OSError) as error:
            reply.trouble = str(error)[:_MAX_WORDS]
        try:
            socket.send_multipart([who.bytes, reply.SerializeToString()], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it is gone, or takes nothing: it will ask again, or somebody else


def _bound(socket: zmq.Socket[bytes], address: str) -> int:
    """The port; 0 where none is free. On all of the machine's addresses where this one is a gateway's."""
    ports = candidate_ports()
    for host in (bracketed(address), "*"):
        try:
            return int(socket.bind_to_random_port(f"tcp://{host}", ports[0], ports[-1] + 1, _TRIES))
        except zmq.ZMQError:
            continue
    return 0


def held_in(folders: ShardFolders) -> Iterator[ShardReply.Held]:
    """Whole shards as far as their heads and tails tell. Raises CheckpointError."""
    for path in folders.paths():
        shard, shards, slot = place_of(path)
        try:
            found = shard_file.glance(path)
            run, step = int(found.tail.header["run"]), int(found.tail.header["step"])
        except (CheckpointError, OSError, KeyError, TypeError, ValueError):
            continue  # being written, torn, or gone
        yield ShardReply.Held(
            run=run, step=step, shard=shard, shards=shards, slot=slot, layout=found.layout_digest, bytes=found.bytes
        )


def piece_of(folders: ShardFolders, asked: ShardRequest) -> bytes:
    """The bytes that were asked for. Raises CheckpointError where the file is not there, or not so long."""
    sound = asked.shard < asked.shards <= 9999 and asked.slot < ALL_SLOTS and asked.bytes <= MAX_SHARD_PIECE
    path = folders.path(asked.shard, asked.shards, asked.slot) if sound else None
    if path is None:
        raise CheckpointError("no shard can be asked for so")
    content = shard_file.content_of(path)
    if asked.offset + asked.bytes > len(content):
        raise CheckpointError(f"{path.name} ends before byte {asked.offset + asked.bytes}")
    return content[asked.offset : asked.offset + asked.bytes].tobytes()
