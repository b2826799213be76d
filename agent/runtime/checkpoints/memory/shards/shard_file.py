"""One shard of one generation in a file: layout, data, what it is of, and a head that is written last.

    0        head: magic, the places of the parts, hashes of layout and tail, hash of the head itself
    4096     layout: JSON, what the state consists of that all ranks share; the same in every shard
    ...      own: state that is this rank's alone; none where ranks differ in nothing
    ...      data: this shard's bytes of the shared state
    ...      tail: JSON, of which job, run and step this is, what its own bytes are, and a hash of every CHUNK_BYTES

A writer clears the head first and writes it last. So who is killed in between leaves a file that says it is torn, and
whoever reads verifies every byte. A file may come from another machine: nothing in it is trusted before its hashes and
sizes agree, and nothing in it can name code to run."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors, write_all
from atoll.agent.runtime.checkpoints.disk.header import Header, check_size, whole_numbers
from atoll.errors import CheckpointError

CHUNK_BYTES: Final = 1 << 20  # hashed on its own, right after it was copied, while it is in the cache
PAGE_BYTES: Final = 4096
MAX_JSON_BYTES: Final = 64 << 20
MAX_FRAME_BYTES: Final = 2 * MAX_JSON_BYTES + 2 * mmap.ALLOCATIONGRANULARITY
"""What a file has at most beside its data."""
_MAGIC: Final = b"ATOLLME2"
_HEAD: Final = struct.Struct("<8sQQQQQ16s16s")  # magic, bytes of layout, own, data and tail, place of own, two hashes
_SEAL: Final = struct.Struct("<16s")
_NUMBERS: Final = ("shard", "shards", "begin", "size", "total")

Bytes = npt.NDArray[np.uint8]  # uint8 [bytes]


class Unsealed(CheckpointError):
    """The writer ended before the file was whole, as one of two always is when a worker is killed."""


class _Head(NamedTuple):
    """Head of a file, without its magic."""

    layout_bytes: int
    own_bytes: int
    data_bytes: int
    tail_bytes: int
    own_at: int
    layout_digest: bytes
    tail_digest: bytes

    @staticmethod
    def of(content: Bytes) -> _Head | None:
        """Return the head of a file, not verified; None if the file is shorter."""
        return _Head(*_HEAD.unpack(content[: _HEAD.size].tobytes())[1:]) if len(content) >= PAGE_BYTES else None

    @staticmethod
    def verified(raw: bytes) -> _Head:
        """Return the head and seal in these bytes. Raises Unsealed if the writer is not done, CheckpointError."""
        if not any(raw[: len(_MAGIC)]):
            raise Unsealed("it was not written to its end")
        if raw[: len(_MAGIC)] != _MAGIC:
            raise CheckpointError("it is no shard of a checkpoint: its first bytes are wrong")
        if raw[_HEAD.size : _HEAD.size + _SEAL.size] != xxhash.xxh3_128_digest(raw[: _HEAD.size]):
            raise CheckpointError("its head does not match the hash behind it")
        head = _Head(*_HEAD.unpack(raw[: _HEAD.size])[1:])
        if max(head.layout_bytes, head.tail_bytes) > MAX_JSON_BYTES or PAGE_BYTES + head.layout_bytes > head.own_at:
            raise CheckpointError("the sizes in its head make no sense")
        return head

    @property
    def end(self) -> int:
        return self.own_at + self.own_bytes + self.data_bytes + self.tail_bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """Description of a shard. begin, size: its place in the `total` bytes of the shared state. moving: state that
    changes with every step and is no tensor, as pack_state made it. header: of the checkpoint, without the model's
    fingerprint. own: description of this rank's own bytes. chunks, own_chunks: hashes."""

    shard: int
    shards: int
    begin: int
    size: int
    total: int
    header: Mapping[str, Any]
    moving: Any
    chunks: tuple[str, ...] = ()
    own: Any = None
    own_chunks: tuple[str, ...] = ()

    @staticmethod
    def from_json(raw: bytes) -> Tail:
        """Raises CheckpointError."""
        body = parsed(raw, "its tail")
        numbers = whole_numbers(body, dict.fromkeys(_NUMBERS, 2**63), "its tail")
        hashes, header = [body.get("chunks"), body.get("own_chunks")], body.get("header")
        for one in hashes:
            if not isinstance(one, list) or not all(isinstance(text, str) for text in one):
                raise CheckpointError("its tail lacks the hashes of its data")
        if not isinstance(header, dict):
            raise CheckpointError("its tail lacks the header")
        chunks, own_chunks = (tuple(one or ()) for one in hashes)
        moving, own = body.get("moving"), body.get("own")
        return Tail(header=header, moving=moving, chunks=chunks, own=own, own_chunks=own_chunks, **numbers)

    def sealed(self, chunks: Sequence[str], own_chunks: Sequence[str] = ()) -> bytes:
        """Return the tail as the file holds it, once the hashes of its data are known."""
        return replace(self, chunks=tuple(chunks), own_chunks=tuple(own_chunks)).to_json()

    def to_json(self) -> bytes:
        names = (*_NUMBERS, "header", "moving", "chunks", "own", "own_chunks")
        return json.dumps({name: getattr(self, name) for name in names}).encode()


@dataclass(frozen=True, slots=True)
class Shard:
    """A file that was read, every byte verified. data: uint8 [tail.size]; own: uint8, empty where it was left out."""

    header: Header
    tail: Tail
    layout: Mapping[str, Any]
    layout_digest: str
    data: Bytes
    own: Bytes


@dataclass(frozen=True, slots=True)
class Glance:
    """Description of a file by itself, its data not read. bytes: those that count."""

    tail: Tail
    layout_digest: str
    bytes: int


class SlotFile:
    """The writer's end of one file. Not thread-safe; close() is idempotent."""

    def __init__(self, path: Path, make_room: Callable[[], bool] = lambda: False) -> None:
        """make_room: gives up what is less needed; whether it could. Raises CheckpointError where the file cannot be
        made."""
        self.path, self._make_room = path, make_room
        self._map: mmap.mmap | None = None
        self._data: Bytes = np.empty(0, np.uint8)
        self._layout_digest = b""
        self._layout_bytes = self._data_at = self._own_bytes = self._content_bytes = 0
        with disk_errors(f"making {path}"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def begin(self, layout: bytes, layout_digest: bytes, data_bytes: int, own_bytes: int = 0) -> Bytes:
        """Give up what the file holds; the memory to write `own_bytes` and behind them `data_bytes` into, beginning at
        a page. Raises CheckpointError where there is no room: all of it is taken here, because a page that cannot be
        had later is a SIGBUS."""
        size = own_bytes + data_bytes
        check_size(size, "this rank's shard")
        _check_json(layout, "layout")

        def take() -> None:
            os.pwrite(self._file, bytes(PAGE_BYTES), 0)
            if layout_digest != self._layout_digest or len(self._data) != size:
                self._lay_out(layout, layout_digest, size)

        self._with_room(size, take)
        self._own_bytes = own_bytes
        return self._data

    def seal(self, tail: bytes) -> None:
        """Make the file count: the bytes that `begin` gave are filled. Raises CheckpointError."""
        _check_json(tail, "tail")
        size = len(self._data)
        head = _HEAD.pack(
            _MAGIC,
            self._layout_bytes,
            self._own_bytes,
            size - self._own_bytes,
            len(tail),
            self._data_at,
            self._layout_digest,
            xxhash.xxh3_128_digest(tail),
        )
        with disk_errors(f"writing {self.path}"):
            self._write(tail, self._data_at + size)
            self._write(head + _SEAL.pack(xxhash.xxh3_128_digest(head)), 0)
        self._content_bytes = self._data_at + size + len(tail)

    @property
    def content_bytes(self) -> int:
        """Bytes of the file that count since `seal`."""
        return self._content_bytes

    def receive(self, total: int) -> None:
        """Make room for a whole file from elsewhere, in place of `begin`. It comes by `put`, its first page last."""
        self._release()
        self._layout_digest = b""

        def take() -> None:
            os.pwrite(self._file, bytes(PAGE_BYTES), 0)
            os.posix_fallocate(self._file, 0, total)

        self._with_room(total, take)

    def put(self, part: bytes | memoryview, place: int) -> None:
        with disk_errors(f"writing {self.path}"):
            self._write(part, place)

    def close(self) -> None:
        self._release()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _with_room(self, needed: int, take: Callable[[], None]) -> None:
        with disk_errors(f"taking {needed} bytes for {self.path}"):
            try:
                take()
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._make_room():
                    raise
                take()

    def _lay_out(self, layout: bytes, digest: bytes, size: int) -> None:
        self._release()
        self._layout_digest = b""
        page = mmap.ALLOCATIONGRANULARITY  # a multiple of PAGE_BYTES
        data_at = -(-(PAGE_BYTES + len(layout)) // page) * page
        end = data_at + size
        os.ftruncate(self._file, 0)  # give back before asking for more
        if end:
            os.posix_fallocate(self._file, 0, end)
        self._write(layout, PAGE_BYTES)
        if size:
            self._map = mmap.mmap(self._file, size, offset=data_at)
            self._data = np.frombuffer(self._map, np.uint8)
        self._layout_digest, self._layout_bytes, self._data_at = digest, len(layout), data_at

    def _write(self, data: bytes | memoryview, place: int) -> None:
        os.lseek(self._file, place, os.SEEK_SET)
        write_all(self._file, data)

    def _release(self) -> None:
        self._data = np.empty(0, np.uint8)
        self._map = None  # goes with the last array that looks at it


def content_of(path: Path) -> Bytes:
    """The bytes of this file, where they lie: of a file that nobody writes any more. Raises CheckpointError."""
    with disk_errors(f"reading {path}"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(file).st_size
            return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ) if size else bytes(1), np.uint8)
        finally:
            os.close(file)


def own_of(content: Bytes) -> Bytes:
    """Return the own bytes of a file, not verified."""
    head = _Head.of(content)
    return content[:0] if head is None else content[head.own_at : head.own_at + head.own_bytes]


def sealed_part(content: Bytes) -> Bytes:
    """Return the bytes of a file that count, unverified: it may have been longer once."""
    head = _Head.of(content)
    return content if head is None else content[: head.end]


def without_own(content: Bytes) -> Bytes:
    """Return a file's bytes as `parse` takes them with own=False: what other ranks need of it."""
    head = _Head.of(content)
    if head is None or not head.own_bytes:
        return content
    return np.concatenate([content[: head.own_at], content[head.own_at + head.own_bytes :]])


def parse(content: Bytes, *, own: bool = True, own_unread: bool = False) -> Shard:
    """Return the shard in these bytes of a file, all of them verified. own: they hold its own bytes too; own_unread:
    those are left alone. Raises CheckpointError saying what is wrong."""
    if len(content) < PAGE_BYTES:
        raise CheckpointError(f"it is torn: {len(content)} bytes are less than its head")
    head = _Head.verified(content[: _HEAD.size + _SEAL.size].tobytes())
    data_at = head.own_at + head.own_bytes * own
    end = data_at + head.data_bytes + head.tail_bytes
    if end > len(content):
        raise CheckpointError(f"it is torn: {len(content)} bytes of {end}")
    raw_layout = content[PAGE_BYTES : PAGE_BYTES + head.layout_bytes].tobytes()
    raw_tail = content[data_at + head.data_bytes : end].tobytes()
    for what, raw, digest in (("layout", raw_layout, head.layout_digest), ("tail", raw_tail, head.tail_digest)):
        if xxhash.xxh3_128_digest(raw) != digest:
            raise CheckpointError(f"its {what} is not what was written")
    tail, layout, data = (
        Tail.from_json(raw_tail),
        parsed(raw_layout, "its layout"),
        content[data_at:][: head.data_bytes],
    )
    _check_data(tail, data)
    own_data = content[head.own_at : head.own_at] if own_unread else content[head.own_at : data_at]
    if own and not own_unread:
        check_own(tail, own_data)
    header = Header.from_json({**tail.header, "model": layout.get("model")})
    return Shard(header, tail, layout, head.layout_digest.hex(), data, own_data)


def glance(path: Path) -> Glance:
    """Read a file's description from its head and tail. The data is not read, so it may still be damaged. Raises
    Unsealed if its writer is not done, CheckpointError."""
    with disk_errors(f"reading {path}"), path.open("rb", buffering=0) as file:
        head = _Head.verified(file.read(_HEAD.size + _SEAL.size))
        file.seek(head.end - head.tail_bytes)
        raw = file.read(head.tail_bytes)
    if xxhash.xxh3_128_digest(raw) != head.tail_digest:
        raise CheckpointError("its tail is not what was written")
    return Glance(Tail.from_json(raw), head.layout_digest.hex(), head.end)


def bounds(total: int, shard: int, shards: int) -> tuple[int, int]:
    """Return where a shard begins and ends in `total` bytes."""
    return total * shard // shards, total * (shard + 1) // shards


def hashed(chunk: Bytes) -> str:
    return xxhash.xxh3_64_hexdigest(chunk.data)


def hashes(data: Bytes) -> list[str]:
    """Return the hash of each chunk."""
    return [hashed(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]


def parsed(raw: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{what} is not an object")
    return body


def _check_json(raw: bytes, what: str) -> None:
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"the {what} of this rank's shard has {len(raw)} bytes; at most {MAX_JSON_BYTES} are read again. Keep long "
            "lists of the state as tensors"
        )


def _check_data(tail: Tail, data: Bytes) -> None:
    if not tail.shard < tail.shards or bounds(tail.total, tail.shard, tail.shards) != (
        tail.begin,
        tail.begin + tail.size,
    ):
        raise CheckpointError(f"shard {tail.shard} of {tail.shards} cannot be bytes {tail.begin} to +{tail.size}")
    if len(data) != tail.size:
        raise CheckpointError(f"it has {len(data)} bytes; {tail.size} were written")
    _check_chunks(data, tail.chunks, "")


def check_own(tail: Tail, own: Bytes) -> None:
    """Check that these are the own bytes of that tail's file. Raises CheckpointError."""
    _check_chunks(own, tail.own_chunks, "own ")


def _check_chunks(data: Bytes, written: Sequence[str], whose: str) -> None:
    if len(written) != -(-len(data) // CHUNK_BYTES):
        raise CheckpointError(f"it has {len(data)} {whose}bytes and hashes of {len(written)} chunks")
    for index, one in enumerate(written):
        begin = index * CHUNK_BYTES
        if hashed(data[begin : begin + CHUNK_BYTES]) != one:
            raise CheckpointError(
                f"{whose}bytes {begin} to {min(begin + CHUNK_BYTES, len(data))} are not those written"
            )
