"""Code bundles of jobs: each a tar.gz, checked before it is kept, in chunks that fit a transaction of etcd."""

from __future__ import annotations

import hashlib
import logging
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Final

from atoll.controller.state import keys
from atoll.controller.state.store import DeletePrefix, Fence, Put, StateStore
from atoll.errors import BadInput, NotFound
from atoll.jobs.code_bundle import members
from atoll.jobs.job_spec import JobSpec
from atoll.network.rpc import CODE_CHUNK_BYTES, MAX_CODE_BYTES

logger = logging.getLogger(__name__)

CACHED_BUNDLES: Final = 4
MAX_CHUNKS: Final = -(-MAX_CODE_BYTES // CODE_CHUNK_BYTES)


class CodeBundles:
    """Bundles by their SHA-256. The last few read stay in memory: all agents of a job ask at the same moment."""

    def __init__(self, store: StateStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        self._cache: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    async def put(self, sha256: str, code: bytes) -> None:
        """Write what is missing of a bundle, checked before: what is there has this hash, and etcd would keep another
        8 MiB of history for each job with the same code."""
        chunks = tuple(code[i : i + CODE_CHUNK_BYTES] for i in range(0, len(code), CODE_CHUNK_BYTES))
        there = (await self._store.read_prefix(keys.code_prefix(sha256), keys_only=True)).entries
        for number, chunk in enumerate(chunks):
            if (key := keys.code(sha256, number)) not in there:
                await self._store.commit([Put(key, chunk)], (), self._fence)
        self._remember(sha256, chunks)

    async def remove_unused(self, used: Collection[str]) -> None:
        """Remove all bundles but these: of a Submit that was refused, or whose controller died, no job tells."""
        there = (await self._store.read_prefix(keys.CODES, keys_only=True)).entries
        for sha256 in sorted({keys.sha256_of_code(key) for key in there} - set(used)):
            logger.info("code %s belongs to no job and is removed", sha256[:8])
            await self._store.commit([DeletePrefix(f"{keys.CODES}{sha256}/")], (), self._fence)
            self._cache.pop(sha256, None)

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


def check_bundle(spec: JobSpec, code: bytes) -> None:
    """Raises BadInput unless `code` is the tar.gz that `spec` names, holds its script and stays inside its folder."""
    if len(code) > MAX_CODE_BYTES:
        raise BadInput(f"the code bundle has {len(code)} bytes, more than {MAX_CODE_BYTES}. Leave data out of it")
    digest = hashlib.sha256(code).hexdigest()
    if digest != spec.code_sha256:
        raise BadInput(
            f"the code bundle's SHA-256 is {digest}, not spec.code_sha256 = {spec.code_sha256}. Send it anew"
        )
    try:
        names = {str(PurePosixPath(member.name)) for _, member in members(code) if member.isfile()}
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, RecursionError) as error:
        raise BadInput(f"the code bundle is not a readable tar.gz: {error}. Send it anew") from error
    if spec.script not in names:
        some = ", ".join(sorted(name for name in names if name.endswith(".py"))[:5]) or "no Python file"
        raise BadInput(
            f"spec.script = {spec.script!r} is not in the code bundle, which has {some}. Give its path there"
        )
