"""Certificates: who gets through a real mTLS server, who does not and what they are told, and what the files are."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
import shutil
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from scripted_controller import ScriptedController
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.client.client import AsyncClient
from atoll.errors import BadInput, Conflict, NotAllowed, NotFound
from atoll.network.rpc import Tls
from atoll.security import certificates, revocation_list

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
LONG_AGO = NOW - datetime.timedelta(days=500)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "ca"
    certificates.create_authority(folder, LONG_AGO)
    return folder


@pytest.fixture(scope="module")
def server(authority: Path) -> Tls:
    return certificates.identity(certificates.issue(authority, "controller", "head", ["127.0.0.1", "head.lab"], NOW))


@pytest.fixture(scope="module")
def ann(authority: Path) -> Tls:
    return certificates.identity(certificates.issue(authority, "client", "ann", [], NOW))


ALL_OF_IT_S = 2.0
"""The timeout where connections end without a word: that is told once it is over."""


async def ask(
    controller: ScriptedController, tls: Tls | None, address: str | None = None, timeout_s: float = 30.0
) -> list[str]:
    async with AsyncClient([address or controller.address], tls=tls, timeout_s=timeout_s) as client:
        return [job.id for job in await client.jobs()]


async def test_a_client_of_the_cluster_gets_through(server: Tls, ann: Tls) -> None:
    with ScriptedController(tls=server) as controller:
        controller.script.add("vit-1")
        assert await ask(controller, ann) == ["vit-1"]


async def test_a_client_that_lives_on_uses_a_certificate_that_was_renewed_meanwhile(
    authority: Path, server: Tls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that is open for a year. 1. Its certificate has run out: it is refused. 2. The key is replaced alone: that
    fits nothing. 3. Once the certificate is there too, the same client is let in."""
    before = certificates.identity(certificates.issue(authority, "client", "page", [], LONG_AGO)).ca.parent
    own = certificates.identity(before.rename(tmp_path / "page"))
    fresh = certificates.identity(certificates.issue(authority, "client", "page", [], NOW))
    with ScriptedController(tls=server) as controller:
        controller.script.add("vit-1")
        async with AsyncClient([controller.address], tls=own, timeout_s=ALL_OF_IT_S) as client:
            with pytest.raises(NotAllowed, match="it expired on"):
                await client.jobs()
            shutil.copy(fresh.key, own.key)
            with pytest.raises(BadInput, match="does not belong to"):
                await client.jobs()
            assert "The files before are used" in caplog.text
            shutil.copy(fresh.certificate, own.certificate)
            assert [job.id for job in await client.jobs()] == ["vit-1"]


async def test_a_client_of_another_cluster_is_told_that_the_ca_differs(server: Tls, tmp_path: Path) -> None:
    certificates.create_authority(tmp_path, NOW)
    stranger = certificates.identity(certificates.issue(tmp_path, "client", "eve", [], NOW))
    with ScriptedController(tls=server) as controller:
        with pytest.raises(NotAllowed, match=r"its certificate was refused.*--tls-ca"):
            await ask(controller, stranger)
        assert not controller.script.calls


async def test_a_strangers_certificate_is_refused_by_the_server(server: Tls, ann: Tls, tmp_path: Path) -> None:
    """Eve has the cluster's public CA but a certificate of her own."""
    certificates.create_authority(tmp_path, NOW)
    own = certificates.identity(certificates.issue(tmp_path, "client", "eve", [], NOW))
    with ScriptedController(tls=server) as controller:
        with pytest.raises(NotAllowed, match=r"refused the certificate .* of client:eve"):
            await ask(controller, Tls(ann.ca, own.certificate, own.key), timeout_s=ALL_OF_IT_S)
        assert not controller.script.calls


async def test_an_expired_client_is_refused(server: Tls, authority: Path) -> None:
    expired = certificates.identity(certificates.issue(authority, "client", "old", [], LONG_AGO))
    with ScriptedController(tls=server) as controller:
        with pytest.raises(NotAllowed, match="it expired on"):
            await ask(controller, expired, timeout_s=ALL_OF_IT_S)
        assert not controller.script.calls


async def test_an_expired_server_is_refused_by_its_clients(authority: Path, ann: Tls) -> None:
    expired = certificates.identity(certificates.issue(authority, "controller", "old", ["127.0.0.1"], LONG_AGO))
    with ScriptedController(tls=expired) as controller, pytest.raises(NotAllowed, match="expired"):
        await ask(controller, ann)


async def test_a_server_under_a_name_it_has_no_certificate_for_is_refused(server: Tls, ann: Tls) -> None:
    with ScriptedController(tls=server) as controller:
        with pytest.raises(NotAllowed, match="made for another host"):
            await ask(controller, ann, f"localhost:{controller.port}")
        assert not controller.script.calls


async def test_no_certificate_at_all_is_refused(server: Tls) -> None:
    with ScriptedController(tls=server) as controller:
        with pytest.raises(NotAllowed, match=r"Name yours with --tls-ca"):
            await ask(controller, None, timeout_s=ALL_OF_IT_S)
        assert not controller.script.calls


async def test_a_server_without_tls_is_named_as_such(ann: Tls) -> None:
    with ScriptedController() as controller, pytest.raises(NotAllowed, match="speaks without TLS"):
        await ask(controller, ann)


async def test_a_client_cannot_pose_as_a_controller(ann: Tls) -> None:
    with ScriptedController(tls=ann) as impostor:
        with pytest.raises(NotAllowed, match="its certificate was refused"):
            await ask(impostor, ann)
        assert not impostor.script.calls


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_a_certificate_says(authority: Path, server: Tls, ann: Tls) -> None:
    ca, head, client = read(authority / "ca.pem"), read(server.certificate), read(ann.certificate)
    assert head.subject.rfc4514_string() == "CN=controller:head"
    assert client.subject.rfc4514_string() == "CN=client:ann"
    names = head.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["head.lab"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]
    assert list(head.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    assert list(client.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not head.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    own_id = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    for leaf in (head, client, ca):
        issuer = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        assert issuer == own_id
    assert head.not_valid_after_utc - NOW == certificates.CERTIFICATE_VALID
    assert ca.not_valid_after_utc - LONG_AGO == certificates.CA_VALID


def test_secrets_are_readable_for_their_owner_only(authority: Path, ann: Tls) -> None:
    for secret in (authority / "ca-key.pem", authority / "join-token", ann.key):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.stat().st_mode) == 0o700
    assert len((authority / "join-token").read_text().strip()) == 43


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    certificates.create_authority(tmp_path, NOW)
    own = certificates.issue(tmp_path, "agent", "gpu-1", [], NOW)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(Conflict, match="was left as it is"):
        certificates.create_authority(tmp_path, NOW)
    with pytest.raises(Conflict, match=r"agent-gpu-1/ca\.pem is there already"):
        certificates.issue(tmp_path, "agent", "gpu-1", [], NOW)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert certificates.read_facts(certificates.identity(own)).common_name == "agent:gpu-1"


def test_bad_names_and_hosts_are_refused_and_leave_nothing(authority: Path) -> None:
    for name in ("", "-x", "a/b", "../up", "a" * 60, "n\u00e9", "a\n"):
        with pytest.raises(BadInput, match="must be 1 to"):
            certificates.issue(authority, "client", name, [], NOW)
    for host in ("", "head:7700", "-x", "a b", "h\u00e9", "*"):
        with pytest.raises(BadInput, match="neither an address nor a name"):
            certificates.issue(authority, "controller", "bad", [host], NOW)
    assert not (authority / "controller-bad").exists()


def test_without_an_authority_there_is_no_certificate(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="atoll certs init"):
        certificates.issue(tmp_path, "client", "ann", [], NOW)
    certificates.create_authority(tmp_path / "a", NOW)
    certificates.create_authority(tmp_path / "b", NOW)
    (tmp_path / "a/ca-key.pem").write_bytes((tmp_path / "b/ca-key.pem").read_bytes())
    with pytest.raises(BadInput, match="does not belong to"):
        certificates.issue(tmp_path / "a", "client", "ann", [], NOW)
    (tmp_path / "b/ca.pem").write_text("garbage")
    with pytest.raises(BadInput, match="no certificate in PEM"):
        certificates.issue(tmp_path / "b", "client", "ann", [], NOW)


def test_an_authority_near_its_end_signs_no_more(tmp_path: Path) -> None:
    certificates.create_authority(tmp_path, NOW - certificates.CA_VALID + datetime.timedelta(days=100))
    with pytest.raises(BadInput, match="ends on"):
        certificates.issue(tmp_path, "client", "ann", [], NOW)


def test_facts_find_the_key_that_belongs_to_another(server: Tls, ann: Tls, tmp_path: Path) -> None:
    assert certificates.read_facts(server).hosts == ("head.lab", "127.0.0.1")
    with pytest.raises(BadInput, match="does not belong to"):
        certificates.read_facts(Tls(ann.ca, ann.certificate, server.key))
    certificates.create_authority(tmp_path, NOW)
    assert not certificates.read_facts(Tls(tmp_path / "ca.pem", ann.certificate, ann.key)).signed_by_ca


def test_revoking_lists_all_that_someone_has_by_now_and_nobody_elses(tmp_path: Path) -> None:
    """A certificate whose folder was moved away to renew it is revoked too: its holder still has it."""
    certificates.create_authority(tmp_path, NOW)
    for _ in range(2):
        certificates.issue(tmp_path, "client", "ann-b", [], NOW).rename(tmp_path / f"moved-{secrets.token_hex(2)}")
    certificates.issue(tmp_path, "agent", "ann-b", [], NOW)
    first = CliRunner().invoke(app, ["certs", "revoke", str(tmp_path), "client-ann-b"])
    assert (first.exit_code, first.stdout) == (0, f"{tmp_path / 'crl.pem'}\n")
    assert "2 more revoked. next: copy" in first.stderr
    again = CliRunner().invoke(app, ["certs", "revoke", str(tmp_path), "client-ann-b"])
    assert "0 more revoked" in again.stderr
    assert len(revocation_list.read(tmp_path / "ca.pem")) == 2
    assert certificates.revoke(tmp_path, "agent-ann-b", NOW)[1] == 1
    assert len(revocation_list.read(tmp_path / "ca.pem")) == 3


def test_what_cannot_be_revoked_is_told(tmp_path: Path) -> None:
    certificates.create_authority(tmp_path, NOW)
    certificates.issue(tmp_path, "controller", "head", ["head"], NOW)
    with pytest.raises(NotFound, match="has issued no certificate to client-ann. Name it as its folder"):
        certificates.revoke(tmp_path, "client-ann", NOW)
    with pytest.raises(BadInput, match="clients and agents read no list.*needs a new authority"):
        certificates.revoke(tmp_path, "controller-head", NOW)
    assert revocation_list.read(tmp_path / "ca.pem") == frozenset()
