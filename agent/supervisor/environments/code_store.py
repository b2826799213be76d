"""Cache of code bundles: fetched once, checked, unpacked once; the newest few are kept."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
import os
import secrets
import shutil
import tarfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from atoll.errors import BadInput, ControllerUnreachable, DeadlineExceeded
from atoll.jobs.code_bundle import members
from atoll.network.message_limits import SHA256
from atoll.network.rpc import MAX_CODE_BYTES

logger = logging.getLogger(__name__)

MAX_BUNDLES: Final = 8
FETCH_DEADLINE_S: Final = 60.0
_RETRY_S: Final = 0.5

Fetch = Callable[[str], AsyncIterator[bytes]]


class CodeStore:
    """Cache of unpacked bundles at folder/SHA. Owns its tasks and its one thread."""

    def __init__(self, folder: Path, fetch: Fetch) -> None:
        """fetch: yields a bundle's bytes. Raises OSError."""
        self._folder = folder
        self._fetch = fetch
        self._fetching: dict[str, asyncio.Task[Path]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-unpack")
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob(".*"):
            shutil.rmtree(torn, ignore_errors=True)

    async def get(self, sha256: str, in_use: Callable[[], Collection[str]]) -> Path:
        """Return the folder with this bundle's files. Concurrent calls for one bundle share the fetch.

        in_use: bundles of living workers, which are kept. Raises AtollError with the cause."""
        folder = self._folder / sha256
        if folder.is_dir():
            os.utime(folder)
            return folder
        task = self._fetching.get(sha256)
        if task is None:
            task = asyncio.create_task(self._bring(sha256, in_use), name=f"fetch {sha256[:8]}")
            self._fetching[sha256] = task
            task.add_done_callback(lambda done: self._fetched(sha256, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fetched(self, sha256: str, done: asyncio.Task[Path]) -> None:
        self._fetching.pop(sha256, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.warning("code %s: %s", sha256[:8], error)

    async def _bring(self, sha256: str, in_use: Callable[[], Collection[str]]) -> Path:
        bundle = await self._fetch_whole(sha256)
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(self._thread, unpack, bundle, self._folder, sha256)
        # Renamed on the event loop, which also gives folders to workers. Only deletion takes long.
        doomed = retire(self._folder, MAX_BUNDLES, {*in_use(), sha256})
        await loop.run_in_executor(self._thread, delete, doomed)
        return folder

    async def _fetch_whole(self, sha256: str) -> bytes:
        """Fetch the bundle; retry while the controller is unreachable, up to FETCH_DEADLINE_S."""
        ends_s = time.monotonic() + FETCH_DEADLINE_S
        while True:
            try:
                async with asyncio.timeout(max(0.1, ends_s - time.monotonic())):
                    return await self._fetch_once(sha256)
            except (ControllerUnreachable, DeadlineExceeded, TimeoutError) as error:
                if time.monotonic() + _RETRY_S > ends_s:
                    why = f"the job's code could not be fetched within {FETCH_DEADLINE_S:.0f} s: {error}"
                    raise DeadlineExceeded(why) from error
            await asyncio.sleep(_RETRY_S)

    async def _fetch_once(self, sha256: str) -> bytes:
        bundle = bytearray()
        async for chunk in self._fetch(sha256):
            bundle += chunk
            if len(bundle) > MAX_CODE_BYTES:
                raise BadInput(f"code {sha256[:8]} is larger than {MAX_CODE_BYTES} bytes")
        if (digest := hashlib.sha256(bundle).hexdigest()) != sha256:
            raise BadInput(f"code {sha256[:8]} arrived damaged: its SHA-256 is {digest[:8]}…, {len(bundle)} bytes")
        return bytes(bundle)


def unpack(bundle: bytes, parent: Path, sha256: str) -> Path:
    """Unpack a tar.gz to parent/sha256, whole or not at all. Raises BadInput, OSError (disk full)."""
    if not SHA256.fullmatch(sha256):
        raise BadInput(f"{sha256[:80]!r} is no SHA-256 digest")
    fresh = parent / f".{sha256}.{secrets.token_hex(4)}"
    fresh.mkdir()
    try:
        for archive, member in members(bundle):
            _place(fresh, archive, member)
        os.rename(fresh, parent / sha256)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError, ValueError) as error:
        raise BadInput(f"the job's code is no proper tar.gz: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return parent / sha256


def _place(folder: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    """Write one file or folder. tarfile's extraction filters need Python 3.11.4, and Debian 12 ships 3.11.2. Only plain
    files and folders are made, so no name can lead out of the folder through a link."""
    path = folder / member.name
    content = archive.extractfile(member)
    if content is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def retire(folder: Path, kept: int, in_use: Collection[str]) -> list[Path]:
    """Rename the least recently used folders, beyond `kept` of them, out of the way; return those to delete.

    folder: has folders named by digests. in_use: names that are never taken."""
    found = [path for path in folder.iterdir() if SHA256.fullmatch(path.name)]
    newest_first = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    doomed = (path for path in newest_first[kept:] if path.name not in in_use)
    return [path.rename(folder / f".{path.name}.{secrets.token_hex(4)}") for path in doomed]


def delete(folders: Collection[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def find_script(folder: Path, script: str) -> Path:
    """Return the script's path inside the unpacked bundle. Raises BadInput."""
    path = folder / script
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        there = sorted(p.name for p in folder.iterdir())[:10]
        raise BadInput(f"script {script!r} is not in the job's code, which has {', '.join(there) or 'no files'}")
    return path
