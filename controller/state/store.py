"""The seam between the controller and what keeps its state. No I/O here; `etcd.py` carries it out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it was at one revision. `lease` is 0 where the key has none."""

    key: str
    value: bytes
    mod_revision: int
    create_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """A key went away, by a delete or because its lease ended."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All entries under a prefix at one revision, sorted by key. A watch goes on from `revision + 1`."""

    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    prefix: str


Change = Put | Delete | DeletePrefix


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while `key` is as it was at `mod_revision`; 0: while there is no such key."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Fence:
    """The leader key as its holder created it. Whoever creates it again gets another create revision."""

    key: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Whole revisions in order, up to and with `revision`.

    reset: the history up to `revision` was compacted, or the store was put back to it, so events may be missing or
    void. List again; the watch itself goes on at `revision`, so that events not newer than the listing are old and
    may be passed over.
    """

    revision: int
    events: tuple[Entry | Deleted, ...]
    reset: bool = False


class StateStore(Protocol):
    """Keys and values that survive, written in transactions.

    Every call ends within the store's deadline. Beside what is named at each call, all raise StoreUnavailable
    (unreachable or too slow) and NotAllowed (etcd refuses this identity).
    """

    async def read(self, key: str) -> Entry | None: ...

    async def read_prefix(self, prefix: str, *, keys_only: bool = False) -> StoreSnapshot:
        """All entries under `prefix` at one revision. keys_only: their values are left out."""
        ...

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        """Make all changes in one step if the fence and all conditions hold, else none. Returns the revision.

        Raises LeadershipLost where the fence does not hold, Conflict where it does but a condition does not,
        NotFound where a lease to attach has expired, BadInput for more than one transaction can carry. Where
        StoreUnavailable says that the outcome is unknown, the changes may or may not have been made: read first.
        """
        ...

    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease; its keys vanish when it is not refreshed for `ttl_s` seconds. Returns its id."""
        ...

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        """Start the lease's time again. Returns the seconds it has now. Raises NotFound when it has expired. Blocks for
        `timeout_s` at most, so it is for a thread: who leads must not depend on how busy an event loop is."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys. One that has ended already is fine."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Every event under `prefix` with mod_revision >= `from_revision` (at least 1), in order, each once.

        Goes on over lost connections for ever, until the iterator (`contextlib.aclosing`) or the
        store is closed.
        """
        ...

    async def close(self) -> None: ...
