"""Brings the workers of a run together: at its launch, and again as members of a later view."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.transport.collectives import collective
from atoll.agent.runtime.transport.gloo_sockets import beside_the_first, open_sockets
from atoll.agent.runtime.transport.process_groups import Group
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.agent.runtime.transport.relayed_store import RelayedStore
from atoll.errors import PeerLost
from atoll.host.routes import address_towards, interface_of

# Until training begins, peers fetch code, import torch and read checkpoints, on slow disks too. Dead ones show at once.
START_TIMEOUT_S: Final = 300.0
MEETING_TURN_S, LATER_TURN_S = 0.01, 0.25
SOON_S: Final = 2.0  # so long it looks often
CONNECT_S: Final = 1.0


def join(
    place: WorkerPlace, device: torch.device, *, abortable: bool = False, links: RelayedLinks | None = None
) -> Group | None:
    """Meet the other ranks; None where there are none. Raises PeerLost if one does not come.

    abortable: `Group.abort` shall end what is under way; on all ranks alike. links: who is reached through the
    relay."""
    if place.world_size == 1:
        return None
    if links is not None:
        address, port = links.meeting(place.master_address, int(os.environ["MASTER_PORT"]))
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    timeout = timedelta(seconds=START_TIMEOUT_S)
    with collective(f"rank {place.rank} waited for the {place.world_size} workers of its run to meet"):
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    return _made(place, device, store, START_TIMEOUT_S, abortable=abortable, links=links)


def join_again(
    place: WorkerPlace,
    port: int,
    device: torch.device,
    *,
    within_s: float,
    given_up: Callable[[float], bool],
    links: RelayedLinks | None = None,
) -> Group | None:
    """Join the members of a later view at `port` of its master, as `join` does; closes the group before. given_up:
    waits the given seconds; returns True if this rendezvous was cancelled. Raises PeerLost."""
    address = place.master_address
    if links is not None and place.world_size > 1:
        address, port = links.meeting(address, port)
    where = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "MASTER_ADDR": address}
    os.environ.update({name: str(value) for name, value in {**where, "MASTER_PORT": port}.items()})
    if place.world_size == 1:
        return None
    begun_s = time.monotonic()
    ends_s = begun_s + within_s
    what = f"at {address}:{port}, where {place.world_size} members of the view meet"

    def until(there: Callable[[], bool]) -> None:
        while not there():
            soon = time.monotonic() < begun_s + SOON_S
            if given_up(MEETING_TURN_S if soon else LATER_TURN_S) or time.monotonic() > ends_s:
                raise PeerLost(f"rank {place.rank} did not meet everyone {what}")

    if not place.is_main:  # torch's store tries again only after most of a second
        until(lambda: _listens_at(address, port))
    with collective(what):
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            place.world_size,
            place.is_main,
            timeout=timedelta(seconds=within_s),
            wait_for_workers=False,
        )
        store.set(f"here/{place.rank}", "")
        everyone = [f"here/{rank}" for rank in range(place.world_size)]
        until(lambda: store.check(everyone))
    try:
        return _made(place, device, store, max(ends_s - time.monotonic(), 1.0), abortable=True, links=links)
    except PeerLost:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def _made(
    place: WorkerPlace,
    device: torch.device,
    store: Any,
    within_s: float,
    *,
    abortable: bool,
    links: RelayedLinks | None,
) -> Group:
    """The group of those who meet at this store of torch's."""
    over_relay = links is not None and links.used
    shared = RelayedStore(store, place.rank, links) if links is not None and over_relay else store
    own = own_address_towards(place.master_address)
    if own is not None and (interface := interface_of(own)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo asks the host's name otherwise, often 127.0.1.1
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost peer then raises; it aborts the process otherwise
    # Otherwise a peer that dies before its communicator is complete blocks the others with no deadline.
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(max(1, round(within_s)))
    timeout = timedelta(seconds=within_s)
    with collective(f"rank {place.rank} waited for the {place.world_size} workers of its run to meet"):
        before = open_sockets()
        by_nccl = device.type == "cuda" and not share_a_gpu(store, place.rank, place.world_size, _uuid(device))
        whole = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
        backend = "gloo" if over_relay else whole  # NCCL's connections are nobody's to lead
        dist.init_process_group(backend, store=shared, rank=place.rank, world_size=place.world_size, timeout=timeout)
        control = dist.new_group(backend=beside_the_first(), timeout=timeout)
    data = dist.group.WORLD
    assert data is not None
    group = Group(
        place.rank,
        place.world_size,
        data,
        control,
        nccl=backend != "gloo",
        links=links,
        island_backend=whole if whole != backend else None,
        store=shared,
        timeout_s=within_s,
    )
    if abortable:
        group.hold_sockets(before)
    group.connect()
    return group


def share_a_gpu(store: Any, rank: int, world_size: int, uuid: str) -> bool:
    """Return whether two ranks are on one GPU, which NCCL refuses. Collective over torch's store; the same on all.

    uuid: of this rank's GPU."""
    store.set(f"gpu/{rank}", uuid)
    return len({store.get(f"gpu/{one}") for one in range(world_size)}) < world_size


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _listens_at(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def own_address_towards(address: str) -> str | None:
    """This machine's address on the way to `address`; None where there is no way."""
    try:
        return address_towards(address)
    except OSError:
        return None  # the rendezvous will say what is wrong with the address
