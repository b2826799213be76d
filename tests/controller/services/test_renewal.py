"""Certificates that are replaced while a controller serves, and certificates that are revoked."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from daemons import CALL_S, Controller, controller, leading
from fake_agent import FakeAgent
from identities import NOW, Certificates

from atoll.errors import BadInput
from atoll.network.rpc import Tls, open_channel
from atoll.security.certificates import create_authority, identity, issue, revoke
from atoll.v1 import jobs_pb2 as pb
from atoll.v1.jobs_pb2_grpc import JobServiceStub


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "authority")


@pytest.fixture
async def head(etcd: str, tmp_path: Path, made: Certificates) -> AsyncIterator[Controller]:
    async with controller(tmp_path / "head", etcd, client_tls=made.alice, tls=made.controller) as one:
        yield await leading(one)


async def presented(address: str, own: Tls) -> int:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=own.ca)
    context.load_cert_chain(own.certificate, own.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number
    finally:
        writer.close()


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


async def test_a_certificate_that_is_replaced_is_used_without_a_restart(
    head: Controller, made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A controller's certificate is about to end. 2. Its files are replaced, the key first. 3. It went on with the
    old one until it was started again. Now new connections have the new one, and streams that were open go on."""
    old = await presented(head.address, made.alice)
    assert old == serial(made.controller.certificate)
    agent = await FakeAgent("a").connect(head.address, made.a)
    (made.folder / "controller-head").rename(tmp_path / "before")
    fresh = identity(issue(made.folder, "controller", "head", ["127.0.0.1"], NOW))
    (made.folder / "controller-head").rename(tmp_path / "fresh")
    (tmp_path / "before").rename(made.folder / "controller-head")
    shutil.copy(tmp_path / "fresh" / "key.pem", fresh.key)
    assert await presented(head.address, made.alice) == old
    assert "key.pem and" in caplog.text
    assert "The files before are used" in caplog.text
    shutil.copy(tmp_path / "fresh" / "cert.pem", fresh.certificate)
    new = serial(tmp_path / "fresh" / "cert.pem")
    assert new != old
    assert await presented(head.address, made.alice) == new
    await agent.beat()
    nodes = await head.stub.ListNodes(pb.ListNodesRequest(), timeout=CALL_S)
    assert (agent.failure, [node.connected for node in nodes.nodes]) == (None, [True])
    await agent.disconnect()


async def outcome(address: str, tls: Tls) -> tuple[grpc.StatusCode, str]:
    async with open_channel(address, tls) as channel:
        try:
            await JobServiceStub(channel).List(pb.ListRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def end_of(stream: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.Job]) -> str:
    """How a stream ends."""
    try:
        async with asyncio.timeout(30):
            while await stream.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "it ended well"


async def test_whoever_is_revoked_is_cut_off_and_let_in_nowhere(head: Controller, made: Certificates) -> None:
    """1. Alice and a node leave the cluster with their keys; both have a stream open. 2. Their certificates counted for
    the rest of the year. 3. Revoked, both streams end, and no new call is taken. 4. Bob notices nothing. 5. A new
    certificate for Alice is good."""
    job = await head.submit()
    watching = head.stub.Watch(pb.WatchRequest(job=job))
    assert (await watching.read()).id == job
    agent = await FakeAgent("a").connect(head.address, made.a)
    async with open_channel(head.address, made.bob) as channel:
        following = JobServiceStub(channel).Events(pb.EventsRequest(job=job, follow=True))
        await following.read()
        revoke(made.folder, "client-alice", NOW)
        listed, added = revoke(made.folder, "agent-a", NOW)
        assert added == 1
        shutil.copy(listed, made.controller.ca.parent)
        ended = await end_of(watching)
        assert ended.startswith("PERMISSION_DENIED: the certificate 'client:alice' is revoked")
        await agent.until(lambda: agent.failure is not None)
        assert agent.failure is not None
        assert "'agent:a' is revoked" in (agent.failure.details() or "")
        await agent.disconnect()
        again = await FakeAgent("a").connect(head.address, made.a)
        assert again.failure is not None
        assert again.failure.code() is grpc.StatusCode.PERMISSION_DENIED
        await again.disconnect()
        assert (await outcome(head.address, made.alice))[0] is grpc.StatusCode.PERMISSION_DENIED
        await JobServiceStub(channel).Cancel(pb.CancelRequest(job=job), timeout=CALL_S)
        while (event := await following.read()) is not grpc.aio.EOF:
            text = event.text
        assert "cancelled" in text
    (made.folder / "client-alice").rename(made.folder / "gone")
    alice = identity(issue(made.folder, "client", "alice", [], NOW))
    assert (await outcome(head.address, alice))[0] is grpc.StatusCode.OK


async def test_a_list_that_cannot_be_read_or_is_not_the_authoritys_revokes_nothing_and_is_told(
    head: Controller, made: Certificates, tmp_path: Path, etcd: str, caplog: pytest.LogCaptureFixture
) -> None:
    listed = made.controller.ca.with_name("crl.pem")
    shutil.copy(revoke(made.folder, "client-bob", NOW)[0], listed)
    async with asyncio.timeout(30):
        while (await outcome(head.address, made.bob))[0] is grpc.StatusCode.OK:  # noqa: ASYNC110 - it looks at a file
            await asyncio.sleep(0.05)
    create_authority(tmp_path / "other", NOW)
    issue(tmp_path / "other", "client", "alice", [], NOW)
    shutil.copy(revoke(tmp_path / "other", "client-alice", NOW)[0], listed)
    async with asyncio.timeout(30):
        while "is not signed by" not in caplog.text:  # noqa: ASYNC110 - it looks at a file
            await asyncio.sleep(0.05)
    assert (await outcome(head.address, made.alice))[0] is grpc.StatusCode.OK
    assert (await outcome(head.address, made.bob))[0] is grpc.StatusCode.PERMISSION_DENIED  # the list before counts
    listed.write_text("no list")
    with pytest.raises(BadInput, match=r"crl\.pem cannot be read"):
        async with controller(tmp_path / "second", etcd, tls=made.controller):
            pass


async def test_files_that_do_not_belong_together_are_refused_at_the_start(
    made: Certificates, tmp_path: Path, etcd: str
) -> None:
    mixed = Tls(made.controller.ca, made.controller.certificate, made.alice.key)
    with pytest.raises(BadInput, match=r"cannot be used together: .*Copy them from one folder"):
        async with controller(tmp_path / "head", etcd, tls=mixed):
            pass
