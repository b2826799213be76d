"""Code bundles of jobs: each a tar.gz, checked before it is kept, in chunks that fit a transaction of etcd."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Final

from atoll.controller.state import keys
from atoll.controller.state.store import Fence, Put, StateStore
from atoll.errors import BadInput, NotFound
from atoll.jobspec import Spec
from atoll.rpc import CODE_CHUNK_BYTES, MAX_CODE_BYTES, MAX_UNPACKED_BYTES

CACHED_BUNDLES: Final = 4
MAX_CHUNKS: Final = -(-MAX_CODE_BYTES // CODE_CHUNK_BYTES)
MAX_FILES: Final = 10_000
_HEADER_BYTES: Final = 2048


class CodeBundles:
    """Bundles by their SHA-256. The last few read stay in memory: all agents of a job ask at the same moment."""

    def __init__(self, store: StateStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        self._cache: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    async def put(self, sha256: str, code: bytes) -> None:
        """Write a bundle, checked before. Writing it again changes nothing."""
        chunks = tuple(code[i : i + CODE_CHUNK_BYTES] for i in range(0, len(code), CODE_CHUNK_BYTES))
        for number, chunk in enumerate(chunks):
            await self._store.commit([Put(keys.code(sha256, number), chunk)], (), self._fence)
        self._remember(sha256, chunks)

    async def chunks(self, sha256: str) -> tuple[bytes, ...]:
        """A bundle in order, one chunk a read, as a whole one exceeds what gRPC carries. Raises NotFound."""
        if sha256 in self._cache:
            self._cache.move_to_end(sha256)
            return self._cache[sha256]
        chunks: list[bytes] = []
        for number in range(MAX_CHUNKS):
            entry = await self._store.read(keys.code(sha256, number))
            if entry is None:
                break
            chunks.append(entry.value)
        if not chunks:
            raise NotFound(f"no code bundle {sha256}. Its job was removed; submit it again")
        self._remember(sha256, tuple(chunks))
        return tuple(chunks)

    def _remember(self, sha256: str, chunks: tuple[bytes, ...]) -> None:
        self._cache[sha256] = chunks
        self._cache.move_to_end(sha256)
        while len(self._cache) > CACHED_BUNDLES:
            self._cache.popitem(last=False)


def check_bundle(spec: Spec, code: bytes) -> None:
    """Raises BadInput unless `code` is the tar.gz that `spec` names, holds its script and stays inside its folder."""
    if len(code) > MAX_CODE_BYTES:
        raise BadInput(f"the code bundle has {len(code)} bytes, more than {MAX_CODE_BYTES}. Leave data out of it")
    digest = hashlib.sha256(code).hexdigest()
    if digest != spec.code_sha256:
        raise BadInput(
            f"the code bundle's SHA-256 is {digest}, not spec.code_sha256 = {spec.code_sha256}. Send it anew"
        )
    try:
        names = _file_names(code)
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, RecursionError) as error:
        raise BadInput(f"the code bundle is not a readable tar.gz: {error}. Send it anew") from error
    if spec.script not in names:
        some = ", ".join(sorted(name for name in names if name.endswith(".py"))[:5]) or "no Python file"
        raise BadInput(
            f"spec.script = {spec.script!r} is not in the code bundle, which has {some}. Give its path there"
        )


def _file_names(code: bytes) -> set[str]:
    names: set[str] = set()
    bytes_left = MAX_UNPACKED_BYTES
    # As a stream, so that no header can lead backwards for ever.
    with tarfile.open(fileobj=_BoundedGzip(code), mode="r|") as archive:
        for count, member in enumerate(archive):
            bytes_left -= member.size
            if bytes_left < 0 or count >= MAX_FILES:
                raise _too_much()
            if member.size < 0:
                raise BadInput(f"the code bundle has {member.name[:80]!r} with {member.size} bytes. Send it anew")
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise BadInput(f"the code bundle has {member.name!r}: only files and folders inside it are allowed")
            if member.isfile():
                names.add(str(path))
    return names


class _BoundedGzip(io.RawIOBase):
    """What a gzip unpacks to, up to a limit: the headers of a small tar may claim gigabytes too, and are read whole."""

    def __init__(self, code: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(code))
        self._left = MAX_UNPACKED_BYTES + MAX_FILES * _HEADER_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise _too_much()
        return data


def _too_much() -> BadInput:
    return BadInput(
        f"the code bundle unpacks to more than {MAX_UNPACKED_BYTES} bytes or {MAX_FILES} files. Leave data out of it"
    )
