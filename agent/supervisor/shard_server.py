"""Server of a job's shards on this machine, for workers of a run without a worker here.

Workers ask over ZeroMQ with CURVE. The agent makes its key at start and registers it with its address, so that a launch
can name both. The controller sends the public keys of the run's ranks, which alone are answered. Each reads its own
job's shards, and of a job only the newest run is answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import zmq
from google.protobuf.message import DecodeError

from atoll.agent.runtime.checkpoints.disk.shard_folders import ALL_SLOTS, ShardFolders, place_of
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.transport.keys import Gatekeeper, Keys, generate, secure_server
from atoll.errors import CheckpointError
from atoll.host.ports import bracketed, candidate_ports
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
    """Shard server. `listen` and `allow` run on the agent's event loop; a thread of its own answers."""

    def __init__(self, folders_of: Callable[[str], ShardFolders]) -> None:
        """folders_of: from a job's id to its shards."""
        self._folders_of = folders_of
        secret, self.public_key = generate()
        self._keys = Keys(secret=secret, public=self.public_key, of={})
        self._allowed: dict[str, tuple[int, frozenset[bytes]]] = {}  # by job: run, its ranks' public keys
        self._address = ""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.port = 0
        """Listening port; 0: none."""

    def listen(self, address: str) -> None:
        """Listen at this address of the machine. If no port is free there, log it and listen nowhere."""
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
        """Answer the ranks of this run, and none of an older one. A connected rank of an older run stays connected: it
        may read what the newer run reads."""
        if run >= self._allowed.get(job, (0, None))[0]:
            self._allowed[job] = (run, frozenset(public))

    def drop(self, job: str) -> None:
        """Stop serving the job."""
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
            return  # it is gone or takes nothing: it will ask again, or ask another agent


def _bound(socket: zmq.Socket[bytes], address: str) -> int:
    """Bind a free port and return it; 0 if none is free. A gateway's address binds all addresses of the machine."""
    ports = candidate_ports()
    for host in (bracketed(address), "*"):
        try:
            return int(socket.bind_to_random_port(f"tcp://{host}", ports[0], ports[-1] + 1, _TRIES))
        except zmq.ZMQError:
            continue
    return 0


def held_in(folders: ShardFolders) -> Iterator[ShardReply.Held]:
    """Yield whole shards, judged by their heads and tails. Raises CheckpointError."""
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
    """Return the requested bytes. Raises CheckpointError if the file is missing or shorter."""
    sound = asked.shard < asked.shards <= 9999 and asked.slot < ALL_SLOTS and asked.bytes <= MAX_SHARD_PIECE
    path = folders.path(asked.shard, asked.shards, asked.slot) if sound else None
    if path is None:
        raise CheckpointError("no shard can be asked for so")
    content = shard_file.content_of(path)
    if asked.offset + asked.bytes > len(content):
        raise CheckpointError(f"{path.name} ends before byte {asked.offset + asked.bytes}")
    return content[asked.offset : asked.offset + asked.bytes].tobytes()
