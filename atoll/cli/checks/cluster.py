"""Checks the way to the cluster and back, and how its nodes, versions and clock look from here."""

from __future__ import annotations

import asyncio
import datetime
import socket
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from atoll.cli.cluster.connection import Connection
from atoll.cli.render.findings import Finding
from atoll.errors import AtollError, BadInput, ControllerUnreachable
from atoll.host.ports import DEFAULT_ADDRESS
from atoll.network.rpc import is_loopback

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.jobs_pb2 import ListNodesReply

_ARRIVES_S: Final = 1.0
"""Seconds after the controller's answer in which its connection may still arrive."""
_MOST_SKEW_S: Final = 2.0
_DEFAULT_ANSWERS_S: Final = 2.0
_EXPIRES_SOON: Final = datetime.timedelta(days=30)


def check_certificates(reached: Connection) -> list[Finding]:
    """Check that this identity's files are complete, signed by the CA beside them, and not about to expire."""
    if reached.tls is None:
        return []
    from atoll.security import certificates

    try:
        facts = certificates.read_facts(reached.tls)
    except BadInput as error:
        return [Finding("certificate", "broken", str(error))]
    now = datetime.datetime.now(datetime.UTC)
    found = f"{facts.common_name}, until {facts.not_after:%Y-%m-%d}"
    step = "make a new one with `atoll certs` in the authority's folder"
    if not facts.signed_by_ca:
        return [Finding("certificate", "broken", f"{found}, not signed by {reached.tls.ca}", step)]
    if facts.not_after < now:
        return [Finding("certificate", "broken", f"{found}: expired", step)]
    if facts.not_after - now < _EXPIRES_SOON:
        return [Finding("certificate", "warning", f"{found}: expires soon", step)]
    return [Finding("certificate", "ok", found)]


def check_cluster(reached: Connection) -> list[Finding]:
    """Check that a controller leads; compare its nodes, versions and clock with this machine."""
    where = ", ".join(reached.controllers)
    if reached.controllers == (DEFAULT_ADDRESS,):  # nobody named one: none being there is no news to wait for
        reached = replace(reached, timeout_s=min(reached.timeout_s, _DEFAULT_ANSWERS_S))
    before_s = time.time()
    try:
        reply = reached.run(lambda client: client.nodes())
    except ControllerUnreachable as error:
        if reached.controllers == (DEFAULT_ADDRESS,):
            step = "start one with `atoll up`, or name yours with --controller HOST:PORT"
            return [Finding("controller", "warning", f"none at {where}, the default", step)]
        return [Finding("controller", "broken", str(error), "see its log, and whether a firewall is between")]
    except AtollError as error:
        return [Finding("controller", "broken", str(error))]
    half_way_s = (before_s + time.time()) / 2
    leads = reply.controller or where
    found = f"{leads} leads, answered in {(time.time() - before_s) * 1000:.0f} ms"
    judged = judge_cluster(reply, version("atoll"), half_way_s)
    return [Finding("controller", "ok", found), *judged, *check_reach(reached)]


def judge_cluster(reply: ListNodesReply, own_version: str, now_s: float) -> list[Finding]:
    """Nodes, versions and clock. now_s: this machine's wall clock when the controller looked at its own."""
    return [_nodes(reply), _versions(reply, own_version), *_clock(reply, now_s)]


def _nodes(reply: ListNodesReply) -> Finding:
    connected = [node for node in reply.nodes if node.connected]
    lost = [f"{node.name} (silent for {node.seen_s_ago:.0f} s)" for node in reply.nodes if not node.connected]
    found = f"{len(connected)} connected with {sum(len(node.devices) for node in connected)} devices"
    if lost:
        return Finding("agents", "warning", f"{found}; lost: {', '.join(lost)}", "see the agent's log on that machine")
    if not connected:
        return Finding("agents", "warning", "none connected", "on each machine: atoll agent --controller HOST:PORT")
    return Finding("agents", "ok", found)


def _versions(reply: ListNodesReply, own: str) -> Finding:
    others = {f"{node.name} {node.version}" for node in reply.nodes if node.version and node.version != own}
    if reply.version and reply.version != own:
        others.add(f"controller {reply.version}")
    if others:
        step = "install the same version everywhere, the controller first"
        return Finding("versions", "warning", f"here {own}, but {', '.join(sorted(others))}", step)
    return Finding("versions", "ok", f"{own} everywhere")


def _clock(reply: ListNodesReply, now_s: float) -> list[Finding]:
    if not reply.unix_s:
        return []
    skew_s = now_s - reply.unix_s
    found = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the controller's"
    if abs(skew_s) > _MOST_SKEW_S:
        step = "set both by NTP: certificates and the times that people see depend on it"
        return [Finding("clock", "warning", found, step)]
    return [Finding("clock", "ok", found)]


def check_reach(reached: Connection) -> list[Finding]:
    """Check whether the controller can dial this machine. Empty if the question cannot be asked."""
    try:
        address, came = reached.run(dialled_back)
    except (AtollError, OSError):
        return []
    return [judge_reach(address, came=came)]


def judge_reach(address: str, *, came: bool) -> Finding:
    """Judge by this machine's address, as the controller sees it. came: True if it was dialled there."""
    if is_loopback(address):
        return Finding("reach", "info", "unknown: the controller is on this machine, or a tunnel to it begins here")
    if came:
        return Finding("reach", "ok", f"the controller dials this machine at {address}")
    step = "to train here: atoll agent --behind-nat, or let the other machines through to all ports of this one"
    return Finding("reach", "info", f"the controller sees {address}, and cannot dial this machine there", step)


async def dialled_back(client: AsyncClient) -> tuple[str, bool]:
    """This machine's address as the controller sees it, and whether the controller could dial it there."""
    came = asyncio.Event()

    async def arrived(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    server = await asyncio.start_server(arrived, sock=_listening())
    async with server:
        address = await client.dial_back(server.sockets[0].getsockname()[1])
        with suppress(TimeoutError):
            await asyncio.wait_for(came.wait(), _ARRIVES_S)
    return address, came.is_set()


def _listening() -> socket.socket:
    """Listen at a free port of all of this machine's addresses."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
