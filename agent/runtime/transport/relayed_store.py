"""The store of a rendezvous in which gloo finds the workers that it cannot dial at ports of this machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from atoll.agent.runtime.transport.gloo_addresses import GlooAddress
from atoll.agent.runtime.transport.relayed_links import RelayedLinks


class RelayedStore(dist.Store):  # type: ignore[name-defined, misc]
    """Store around `inner`, which all ranks of a run share. Each rank uses its own RelayedStore."""

    def __init__(self, inner: Any, rank: int, links: RelayedLinks) -> None:
        super().__init__()
        self._inner, self._rank, self._links = inner, rank, links

    def set(self, key: str, value: Any) -> None:
        if isinstance(value, bytes) and (said := GlooAddress.parse(value)) is not None:
            value = bytes(said.tagged(self._rank))
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._inner.get(key)
        said = GlooAddress.parse(value)
        return value if said is None or said.rank < 0 else bytes(self._seen(said))

    def _seen(self, said: GlooAddress) -> GlooAddress:
        """Raises PeerLost."""
        rank, said = said.rank, said.tagged(-1)
        if not self._links.crosses(rank):
            return said
        if rank < self._rank:
            return said.dialled_at(self._links.port(rank, said.port, seal=True))
        return said.never_dialled()

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: bytes = self._inner.compare_set(key, expected, desired)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._inner.timeout
        return found
