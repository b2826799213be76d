"""StateStore on a real etcd."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import grpc.aio

from atoll.controller.state.endpoints import HAS_LEADER, Endpoints, EtcdMember
from atoll.controller.state.store import (
    Change,
    Delete,
    DeletePrefix,
    Entry,
    Fence,
    Put,
    StoreSnapshot,
    Unchanged,
    WatchBatch,
)
from atoll.controller.state.watch import entry_of, prefix_end, watch
from atoll.errors import BadInput, Conflict, LeadershipLost, NotFound, StoreUnavailable
from atoll.network.rpc import Tls
from atoll.v1 import etcd_pb2 as wire
from atoll.v1.etcd_pb2_grpc import LeaseStub

logger = logging.getLogger(__name__)

MAX_TXN_OPS: Final = 128  # etcd's --max-txn-ops
MAX_TXN_BYTES: Final = 1536 * 1024 - 512  # etcd's --max-request-bytes, less the header it adds
_PAGE_KEYS: Final = 500


class EtcdStore:
    """See StateStore. Made inside a running event loop; the owner closes it."""

    def __init__(self, endpoints: Sequence[str], tls: Tls | None, timeout_s: float = 3.0) -> None:
        self.endpoints: Final = Endpoints(endpoints, tls, timeout_s)

    async def read(self, key: str) -> Entry | None:
        reply = await self._ask(_range, wire.RangeRequest(key=key.encode()), f"reading {key}")
        return entry_of(reply.kvs[0]) if reply.kvs else None

    async def read_prefix(self, prefix: str, *, keys_only: bool = False) -> StoreSnapshot:
        entries: dict[str, Entry] = {}
        start, revision = prefix.encode(), 0
        while True:
            request = wire.RangeRequest(
                key=start, range_end=prefix_end(prefix), limit=_PAGE_KEYS, revision=revision, keys_only=keys_only
            )
            reply = await self._ask(_range, request, f"listing {prefix}")
            revision = revision or reply.header.revision  # later pages show the same moment as the first
            for kv in reply.kvs:
                entry = entry_of(kv)
                entries[entry.key] = entry
            if not reply.more:
                return StoreSnapshot(revision, entries)
            start = reply.kvs[-1].key + b"\0"

    async def commit(
        self, changes: Sequence[Change], conditions: Sequence[Unchanged] = (), fence: Fence | None = None
    ) -> int:
        request = _txn(changes, conditions, fence)
        doing = f"writing {_name(changes)}"

        async def attempt(member: EtcdMember, timeout_s: float) -> Any:
            deadline = time.monotonic() + timeout_s
            reply = await member.kv.Txn(request, timeout=timeout_s, metadata=HAS_LEADER)
            if reply.succeeded and self.endpoints.single:
                await _until_kept(member, reply.header.raft_term, doing, deadline - time.monotonic())
            return reply

        reply = await self.endpoints.call(attempt, doing, repeatable=False)
        if not reply.succeeded:
            _raise_refusal(doing, conditions, fence, [list(r.response_range.kvs) for r in reply.responses])
        return int(reply.header.revision)

    async def grant_lease(self, ttl_s: int) -> int:
        # May be repeated: a lease that was granted to nobody ends by itself.
        request = wire.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._ask(lambda member: member.lease.LeaseGrant, request, "granting a lease")
        return int(reply.ID)

    def refresh_lease(self, lease: int, timeout_s: float) -> float:
        doing = f"refreshing lease {lease:x}"

        def attempt(stub: LeaseStub, timeout_s: float) -> wire.LeaseKeepAliveResponse | None:
            requests = iter([wire.LeaseKeepAliveRequest(ID=lease)])
            return next(stub.LeaseKeepAlive(requests, timeout=timeout_s, metadata=HAS_LEADER), None)

        reply = self.endpoints.call_blocking(attempt, doing, timeout_s)
        if reply is None:
            raise StoreUnavailable(f"{doing}: etcd ended the call without an answer")
        if reply.TTL <= 0:
            raise NotFound(f"{doing}: it has expired, and its keys are gone")
        return float(reply.TTL)

    async def revoke_lease(self, lease: int) -> None:
        request = wire.LeaseRevokeRequest(ID=lease)
        try:
            await self._ask(lambda member: member.lease.LeaseRevoke, request, f"revoking lease {lease:x}")
        except NotFound:
            logger.debug("lease %x had ended already", lease)

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        return watch(self.endpoints, prefix, from_revision)

    async def close(self) -> None:
        await self.endpoints.close()

    async def _ask(self, method: Callable[[EtcdMember], Any], request: Any, doing: str) -> Any:
        """Make a call that may be repeated."""

        async def attempt(member: EtcdMember, timeout_s: float) -> Any:
            return await method(member)(request, timeout=timeout_s, metadata=HAS_LEADER)

        return await self.endpoints.call(attempt, doing, repeatable=True)


def _range(member: EtcdMember) -> Any:
    return member.kv.Range


async def _until_kept(member: EtcdMember, raft_term: int, doing: str, timeout_s: float) -> None:
    """Return when a write that was just answered in `raft_term` is in etcd's log.

    A cluster of one member answers a write before that (etcd before 3.4.21 and 3.5.5, its issue 14370), and where it
    is killed then, the write is lost. It answers a read only when the log has what came before.

    Raises StoreUnavailable where it does not answer, or does so after a restart, which is a new term.
    """
    lost = StoreUnavailable(
        f"{doing}: etcd at {member.address} took it and ended before it was in its log, so the outcome is unknown"
    )
    nothing = wire.RangeRequest(key=b"\0", limit=1, keys_only=True)
    try:
        reply = await member.kv.Range(nothing, timeout=max(timeout_s, 0.001), metadata=HAS_LEADER)
    except grpc.aio.AioRpcError as error:
        raise lost from error
    if reply.header.raft_term != raft_term:
        raise lost


def _txn(changes: Sequence[Change], conditions: Sequence[Unchanged], fence: Fence | None) -> Any:
    """Make the transaction. Where it is refused, it reads back every key that it compared, the fence's first."""
    equal, compare = wire.Compare.EQUAL, []
    if fence is not None:
        key, created = fence.key.encode(), fence.create_revision
        compare.append(wire.Compare(result=equal, target=wire.Compare.CREATE, key=key, create_revision=created))
    for condition in conditions:
        key, revision = condition.key.encode(), condition.mod_revision
        compare.append(wire.Compare(result=equal, target=wire.Compare.MOD, key=key, mod_revision=revision))
    if max(len(changes), len(compare)) > MAX_TXN_OPS:
        raise BadInput(
            f"a commit of {len(changes)} changes under {len(compare)} conditions exceeds the {MAX_TXN_OPS} that one "
            "etcd transaction may have of each. Split it"
        )
    read_back = [wire.RequestOp(request_range=wire.RangeRequest(key=one.key, keys_only=True)) for one in compare]
    request = wire.TxnRequest(compare=compare, success=[_operation(change) for change in changes], failure=read_back)
    if request.ByteSize() > MAX_TXN_BYTES:
        raise BadInput(
            f"writing {_name(changes)}: {request.ByteSize()} bytes exceed the {MAX_TXN_BYTES} that one etcd "
            "transaction may have. Split it"
        )
    return request


def _operation(change: Change) -> Any:
    match change:
        case Put(key, value, lease):
            return wire.RequestOp(request_put=wire.PutRequest(key=key.encode(), value=value, lease=lease))
        case Delete(key):
            return wire.RequestOp(request_delete_range=wire.DeleteRangeRequest(key=key.encode()))
        case DeletePrefix(prefix):
            request = wire.DeleteRangeRequest(key=prefix.encode(), range_end=prefix_end(prefix))
            return wire.RequestOp(request_delete_range=request)


def _raise_refusal(
    doing: str, conditions: Sequence[Unchanged], fence: Fence | None, read_back: list[list[Any]]
) -> None:
    """Say which comparison failed, from what the transaction read in place of writing."""
    found = [entry_of(kvs[0]) if kvs else None for kvs in read_back]
    if fence is not None:
        leader = found.pop(0)
        if leader is None or leader.create_revision != fence.create_revision:
            now = "is gone" if leader is None else f"was created anew at revision {leader.create_revision}"
            raise LeadershipLost(
                f"{doing}: the leader key {fence.key} {now}, this controller's was of revision "
                f"{fence.create_revision}. Nothing was written; stop and campaign again"
            )
    for condition, entry in zip(conditions, found, strict=True):
        key, mod_revision = condition.key, condition.mod_revision
        if entry is None and mod_revision:
            raise Conflict(f"{doing}: {key} was deleted since revision {mod_revision}. Read it again")
        if entry is not None and not mod_revision:
            raise Conflict(f"{doing}: {key} exists already, since revision {entry.create_revision}")
        if entry is not None and entry.mod_revision != mod_revision:
            changed = f"was changed at revision {entry.mod_revision}, after {mod_revision}"
            raise Conflict(f"{doing}: {key} {changed}. Read it again")
    raise Conflict(f"{doing}: a condition did not hold. Read again")


def _name(changes: Sequence[Change]) -> str:
    """The changes for an error message: the first one's key and how many more."""
    if not changes:
        return "nothing (conditions only)"
    first = changes[0]
    key = first.prefix if isinstance(first, DeletePrefix) else first.key
    return key if len(changes) == 1 else f"{key} and {len(changes) - 1} more"
