"""Inventory of a job's checkpoints on this node, from heads and manifests, without reading the state. On request the
checkpoints are removed first, and the rest is reported."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age
from atoll.agent.runtime.checkpoints.disk.shard_folders import ShardFolders, place_of
from atoll.agent.runtime.checkpoints.disk.store import Listing, Store, answered
from atoll.agent.runtime.checkpoints.memory.shards import shard_file
from atoll.agent.runtime.checkpoints.memory.shards.shard_file import Unsealed
from atoll.errors import CheckpointError
from atoll.v1.agents_pb2 import HeldCheckpoint, HeldShard, Inventory, TakeInventory

MAX_CHECKPOINTS: Final = 256
STORE_ANSWER_S: Final = 8.0
STORE_REMOVE_S: Final = 60.0
_WORDS: Final = 500
_END_S: Final = 1.0


class InventoryTaker:
    """Inventory in a thread, one request at a time: a hanging disk delays only its own answer."""

    def __init__(
        self, memory: tuple[Path, Path], checkpoints_of: Callable[[str], Path], answer: Callable[[Inventory], None]
    ) -> None:
        """memory: folders in memory and on disk that hold one folder a job. checkpoints_of: from a job's `directory` to
        the folder that holds one folder a job. answer: called on the inventory's thread."""
        self._memory, self._checkpoints_of, self._answer = memory, checkpoints_of, answer
        self._looking: threading.Thread | None = None

    def take(self, asked: TakeInventory) -> None:
        """Start an inventory. `answer` may be called before or after this returns."""
        if self._looking is not None and self._looking.is_alive():
            self._answer(Inventory(request=asked.request, troubles=["an earlier look has not ended yet; ask again"]))
            return
        self._looking = threading.Thread(target=self._look, args=(asked,), name="inventory", daemon=True)
        self._looking.start()

    def close(self) -> None:
        """Shut down without waiting for an inventory that hangs: it only reads."""
        if self._looking is not None:
            self._looking.join(timeout=_END_S)

    def _look(self, asked: TakeInventory) -> None:
        inventory = Inventory(request=asked.request)
        with _troubles_noted(inventory, "memory"):
            inventory.memory.extend(shards_in(ShardFolders(*(root / asked.job for root in self._memory))))
        folder = self._checkpoints_of(asked.directory) / asked.job
        removes = asked.remove and not asked.keep_checkpoints
        done = "removed" if removes else "looked at"
        with _troubles_noted(inventory, str(folder), done):
            if removes:
                remove_folder(folder)
            inventory.disk.extend(checkpoints_in(folder))
        if asked.store and "://" in asked.directory:
            url = f"{asked.directory.rstrip('/')}/{asked.job}"
            with _troubles_noted(inventory, url, done):
                if removes:
                    answered(url, Store.remove_all, STORE_REMOVE_S)
                inventory.store.extend(checkpoints_under(url))
        self._answer(inventory)


def shards_in(folders: ShardFolders) -> list[HeldShard]:
    """List the shards of one job. Raises CheckpointError."""
    found = []
    for path in folders.paths():
        number, shards, _ = place_of(path)
        held = HeldShard(shard=number, shards=shards)
        try:
            tail = shard_file.glance(path).tail
            held.run, held.step = Moment(int(tail.header["run"]), int(tail.header["step"]))
            held.age_s = _age_s(path)
            held.bytes = path.stat().st_size
        except Unsealed:
            held.writing = True
        except FileNotFoundError:
            continue  # removed meanwhile
        except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
            held.trouble = f"{path.name}: {error}"[:_WORDS]
        found.append(held)
    return found


def checkpoints_in(folder: Path) -> list[HeldCheckpoint]:
    """List the checkpoints of one job, the newest first. Raises CheckpointError."""
    found = []
    for moment, path in list(by_age(folder).items())[:MAX_CHECKPOINTS]:
        held = HeldCheckpoint(run=moment.run, step=moment.step, path=str(path))
        try:
            held.age_s = _age_s(path)
            held.bytes = listing.check_whole(path).state_bytes
        except FileNotFoundError:
            continue  # removed meanwhile
        except (CheckpointError, OSError) as error:
            held.trouble = str(error)[:_WORDS]
        found.append(held)
    return found


def checkpoints_under(url: str) -> list[HeldCheckpoint]:
    """List the checkpoints of one job in its object store, the newest first. Raises CheckpointError."""

    def look(store: Store) -> tuple[Listing, dict[Moment, str]]:
        listing = store.list()
        troubles = {}
        for moment in sorted(listing.whole, reverse=True)[:MAX_CHECKPOINTS]:
            try:
                found, _ = store.manifest(moment)
                if found.state_bytes != listing.whole[moment].state_bytes:
                    troubles[moment] = f"torn: {listing.whole[moment].state_bytes} of {found.state_bytes} bytes"
            except CheckpointError as error:
                troubles[moment] = str(error)[:_WORDS]
        return listing, troubles

    listed, troubles = answered(url, look, STORE_ANSWER_S)
    found = []
    for moment in sorted({*listed.whole, *listed.torn}, reverse=True)[:MAX_CHECKPOINTS]:
        stored = listed.whole.get(moment)
        modified_unix_s = stored.modified_unix_s if stored is not None else None
        held = HeldCheckpoint(
            run=moment.run,
            step=moment.step,
            bytes=stored.state_bytes if stored is not None else 0,
            age_s=max(0.0, time.time() - modified_unix_s) if modified_unix_s is not None else -1.0,
            trouble=troubles.get(moment, "") if stored is not None else "being uploaded, or cut off",
            path=f"{url}/{moment.name}",
        )
        found.append(held)
    return found


def remove_folder(folder: Path) -> None:
    """Remove a job's folder with its content. Another agent may remove it concurrently. Raises OSError."""

    def failed(what: object, path: str, about: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(about[1], FileNotFoundError):
            raise about[1]

    shutil.rmtree(folder, onerror=failed)  # refuses a link


def _age_s(path: Path) -> float:
    """Return a file's age by this node's wall clock, for display."""
    return max(0.0, time.time() - path.stat().st_mtime)


@contextmanager
def _troubles_noted(inventory: Inventory, where: str, done: str = "looked at") -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        inventory.troubles.append(f"{where} cannot be {done}: {error}"[:_WORDS])
