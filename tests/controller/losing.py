"""A store whose answers get lost: etcd did what it was asked for, and nobody hears of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from atoll.controller.state.store import Change, Entry, Fence, StateStore, StoreSnapshot, Unchanged, WatchBatch
from atoll.errors import AtollError, StoreUnavailable

T = TypeVar("T")


class LosingAnswers:
    """Loses the answer to its `at`-th call, whatever that is, or of those that do `what`; 0 loses none. resets: each
    watch begins with a reset."""

    def __init__(self, inner: StateStore, *, resets: bool = False) -> None:
        self._inner = inner
        self._resets = resets
        self._at = self._calls = 0
        self._what = ""
        self.lost = ""

    def arm(self, at: int, what: str = "") -> None:
        """Count from here."""
        self._at, self._calls, self._what = at, 0, what

    def _is_lost(self, doing: str) -> bool:
        if not doing.startswith(self._what):
            return False
        self._calls += 1
        return self._calls == self._at

    async def _answer(self, doing: str, asked: Awaitable[T]) -> T:
        if not self._is_lost(doing):
            return await asked
        self.lost = doing
        with suppress(AtollError):
            await asked
        raise StoreUnavailable(f"{doing}: the answer was lost")

    async def read(self, key: str) -> Entry | None:
        return await self._answer(f"reading {key}", self._inner.read(key))

    async def read_prefix(self, prefix: str, *, keys_only: bool = False) -> StoreSnapshot:
        return await self._answer(f"listing {prefix}", self._inner.read_prefix(prefix, keys_only=keys_only))

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        return await self._answer("writing", self._inner.commit(changes, conditions, fence))

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._answer("granting a lease", self._inner.grant_lease(ttl_s))

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        doing = "refreshing a lease"
        lost = self._is_lost(doing)
        left_s = self._inner.refresh_lease(lease, timeout_s)
        if lost:
            self.lost = doing
            raise StoreUnavailable(f"{self.lost}: the answer was lost")
        return left_s

    async def revoke_lease(self, lease: int) -> None:
        await self._answer("revoking a lease", self._inner.revoke_lease(lease))

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if self._resets:
            yield WatchBatch(from_revision, (), reset=True)
        async with aclosing(self._inner.watch(prefix, from_revision)) as batches:
            async for batch in batches:
                yield batch

    async def close(self) -> None:
        await self._inner.close()
