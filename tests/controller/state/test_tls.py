"""etcd over mutual TLS: who has the cluster's certificate gets in, and who has not is told why."""

from __future__ import annotations

import asyncio
import datetime
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from etcd_server import EtcdServer

from atoll.controller.state.election import Election, read_until_answered
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.store import Put
from atoll.errors import BadInput, StoreUnavailable
from atoll.network.rpc import Tls
from atoll.security import certificates


@dataclass(frozen=True)
class Secured:
    server: EtcdServer
    own: Tls
    stranger: Tls
    """Signed by another CA, whose certificate it also trusts."""


def identity(ca: trustme.CA, folder: Path, host: str) -> Tls:
    folder.mkdir()
    tls = Tls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    ca.cert_pem.write_to_path(tls.ca)
    issued = ca.issue_cert(host)
    issued.cert_chain_pems[0].write_to_path(tls.certificate)
    issued.private_key_pem.write_to_path(tls.key)
    return tls


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    ours, foreign = trustme.CA(), trustme.CA()
    etcd = identity(ours, tmp_path / "etcd", "127.0.0.1")
    flags = [f"--cert-file={etcd.certificate}", f"--key-file={etcd.key}", f"--trusted-ca-file={etcd.ca}"]
    server = EtcdServer(tmp_path / "server", [*flags, "--client-cert-auth"])
    server.start()
    own = identity(ours, tmp_path / "own", "controller")
    stranger = identity(foreign, tmp_path / "stranger", "controller")
    yield Secured(server, own, stranger)
    server.stop()


@asynccontextmanager
async def opened(server: EtcdServer, tls: Tls | None, timeout_s: float = 30.0) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([server.endpoint], tls, timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def told(store: EtcdStore, why: str) -> None:
    """Each read fails; the reason is known once a handshake was tried, which a busy machine may take longer for than
    one read does."""
    async with asyncio.timeout(30):
        while True:
            with pytest.raises(StoreUnavailable) as refused:
                await store.read("/atoll/a")
            if why in str(refused.value):
                return


async def test_mutual_tls_carries_transactions_watches_and_elections(secured: Secured) -> None:
    async with opened(secured.server, secured.own) as store:
        revision = await store.commit([Put("/atoll/a", b"1")])
        async for batch in store.watch("/atoll/a", revision):
            assert batch.revision == revision
            break
        leadership = await Election(store, "/atoll/leader", b"me", 60).campaign()
        await store.commit([Put("/atoll/a", b"2")], fence=leadership.fence)
        await leadership.resign()


async def test_a_client_without_certificate_is_told_to_bring_one(secured: Secured) -> None:
    async with opened(secured.server, None, 0.5) as store:
        await told(store, "etcd runs with TLS: give this controller a CA, a certificate")


async def test_a_client_that_trusts_another_ca_is_told_about_cas(secured: Secured) -> None:
    async with opened(secured.server, secured.stranger, 0.5) as store:
        await told(store, "signed by the same CA")


async def test_a_certificate_of_another_ca_is_refused_by_etcd(secured: Secured) -> None:
    mixed = Tls(secured.own.ca, secured.stranger.certificate, secured.stranger.key)
    async with opened(secured.server, mixed, 0.5) as store:
        await told(store, "signed by the same CA")


async def test_files_that_are_replaced_are_used_for_the_next_connection(secured: Secured) -> None:
    """1. A controller's certificate for etcd has ended, and etcd refuses it. 2. A new one is copied over it. 3. It had
    to be started again to use it."""
    kept = Tls(secured.own.ca, secured.stranger.certificate, secured.stranger.key)
    async with opened(secured.server, kept, 0.5) as store:
        await told(store, "signed by the same CA")
        shutil.copy(secured.own.key, kept.key)
        shutil.copy(secured.own.certificate, kept.certificate)
        async with asyncio.timeout(30):
            await read_until_answered(store, "/atoll/a")


async def test_an_authority_made_for_etcd_alone_opens_it_to_controllers_and_to_no_agent(tmp_path: Path) -> None:
    """As docker-compose.yml and docs/deploy.md set it up, with the certificates of `atoll certs`."""
    now = datetime.datetime.now(datetime.UTC)
    certificates.create_authority(tmp_path / "store", now)
    certificates.create_authority(tmp_path / "cluster", now)
    etcd = certificates.identity(certificates.issue(tmp_path / "store", "controller", "etcd", ["127.0.0.1"], now))
    own = certificates.identity(certificates.issue(tmp_path / "store", "client", "controller", [], now))
    agent = certificates.identity(certificates.issue(tmp_path / "cluster", "agent", "a", [], now))
    flags = [f"--cert-file={etcd.certificate}", f"--key-file={etcd.key}", f"--trusted-ca-file={etcd.ca}"]
    server = EtcdServer(tmp_path / "server", [*flags, "--client-cert-auth", "--enable-grpc-gateway=false"])
    server.start()
    try:
        async with opened(server, own) as store:
            await store.commit([Put("/atoll/a", b"1")])
        async with opened(server, Tls(own.ca, agent.certificate, agent.key), 0.5) as store:
            await told(store, "signed by the same CA")
    finally:
        server.stop()


async def test_tls_to_an_etcd_without_is_told(etcd: str, secured: Secured) -> None:
    store = EtcdStore([etcd], secured.own, 0.5)
    try:
        await told(store, "signed by the same CA")
    finally:
        await store.close()


async def test_a_certificate_file_that_is_not_there_is_named(secured: Secured, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no-such\.pem"):
        EtcdStore([secured.server.endpoint], Tls(secured.own.ca, tmp_path / "no-such.pem", secured.own.key))
