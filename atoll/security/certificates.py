"""A cluster's own certificate authority: who may be a controller, a client, an agent.

The authority's folder holds `ca.pem`, `ca-key.pem`, `join-token` and each certificate that it `issued`. Each identity
gets a folder of its own under it with `ca.pem`, `cert.pem` and `key.pem`: copy it to its machine and name it in
ATOLL_TLS_DIR. The role is in the common name: "controller:HOST", "client:NAME", "agent:NODE", "volunteer:NODE".
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import BadInput, Conflict, NotFound
from atoll.network.rpc import Tls
from atoll.security import revocation_list, volunteer_ticket

Role = Literal["controller", "client", "agent", "volunteer"]

CA_VALID: Final = datetime.timedelta(days=3650)
CERTIFICATE_VALID: Final = datetime.timedelta(days=365)
_CLOCK_SKEW: Final = datetime.timedelta(days=2)  # machines whose clocks run behind, by a day say, must accept a new one
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_COMMON_NAME: Final = 64  # X.520
_HOST: Final = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """Content of a certificate. `common_name` holds the role."""

    common_name: str
    hosts: tuple[str, ...]
    not_after: datetime.datetime
    signed_by_ca: bool


def identity(folder: Path) -> Tls:
    """The three files of one identity's folder."""
    return Tls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


def create_authority(folder: Path, now: datetime.datetime) -> None:
    """Make the authority and the token that agents join with. Raises Conflict where one is there already."""
    for file in ("ca.pem", "ca-key.pem", "join-token"):
        _refuse_existing(folder / file)
    key = ec.generate_private_key(ec.SECP256R1())
    # Two clusters' authorities must not look alike to OpenSSL, which searches issuers by name.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Atoll cluster {secrets.token_hex(4)}")])
    certificate = (
        _builder(name, name, key.public_key(), now, CA_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _make_folder(folder)
    _write(folder / "ca-key.pem", _pem(key), mode=0o600)
    _write(folder / "join-token", secrets.token_urlsafe(32).encode() + b"\n", mode=0o600)
    _write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def issue(folder: Path, role: Role, name: str, hosts: Sequence[str], now: datetime.datetime) -> Path:
    """Sign a certificate with the authority in `folder`; return the identity's own folder.

    hosts: names and addresses that a controller is reached by. Raises BadInput, NotFound without an authority, Conflict
    where the identity exists.
    """
    common_name = f"{role}:{name}"
    if not _NAME.fullmatch(name) or len(common_name) > _MAX_COMMON_NAME:
        most = _MAX_COMMON_NAME - len(role) - 1
        raise BadInput(f"name {name!r} must be 1 to {most} of letters, digits, '.', '_', '-', starting with a letter")
    authority, authority_key = _load_authority(folder)
    if authority.not_valid_after_utc - now < CERTIFICATE_VALID:
        raise BadInput(
            f"the authority in {folder} ends on {authority.not_valid_after_utc:%Y-%m-%d}, before a new certificate. "
            "Make a new one with `atoll certs init`"
        )
    own = folder / f"{role}-{name}"
    for file in ("ca.pem", "cert.pem", "key.pem"):
        _refuse_existing(own / file)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    server = role == "controller"
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    alternatives = [_general_name(host) for host in dict.fromkeys(hosts)] if server else [_uri(role, name)]
    certificate = (
        _builder(subject, authority.subject, key.public_key(), now, CERTIFICATE_VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(_authority_identifier(authority), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _make_folder(own)
    _write(own / "key.pem", _pem(key), mode=0o600)
    _write(own / "ca.pem", authority.public_bytes(serialization.Encoding.PEM), mode=0o644)
    _write(own / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    _make_folder(folder / "issued")
    record = folder / "issued" / f"{certificate.serial_number:x}.pem"
    _write(record, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return own


def issue_volunteer(folder: Path, node: str, now: datetime.datetime) -> Path:
    """Issue an identity as `issue`, with the token that lets this node join only as a volunteer."""
    path = folder / "join-token"
    try:
        join_token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"no join token in {folder}: {error}. Make one with `atoll certs init {folder}`") from error
    own = issue(folder, "volunteer", node, [], now)
    _write(own / "token", volunteer_ticket.token(join_token, node).encode() + b"\n", mode=0o600)
    return own


def revoke(folder: Path, name: str, now: datetime.datetime) -> tuple[Path, int]:
    """Revoke all certificates that were issued until now as `name`, e.g. client-alice; return the list that controllers
    read, and how many it adds. Raises NotFound where none was issued, BadInput for a controller's."""
    role, _, own_name = name.partition("-")
    if role == "controller":
        raise BadInput(
            f"{name}: clients and agents read no list. A controller whose key others know needs a new authority: "
            "`atoll certs init` in another folder, and new certificates for all"
        )
    _, key = _load_authority(folder)
    files = [*sorted((folder / "issued").glob("*.pem")), folder / name / "cert.pem"]
    issued = [_parse(path, path.read_bytes()) for path in files if path.is_file()]
    serials = {each.serial_number for each in issued if _common_name(each) == f"{role}:{own_name}"}
    if not serials:
        raise NotFound(
            f"{folder} has issued no certificate to {name}. Name it as its folder: client-alice, agent-node7"
        )
    before = revocation_list.read(folder / "ca.pem")
    return revocation_list.write(folder / "ca.pem", key, before | serials, now), len(serials - before)


def read_facts(tls: Tls) -> Facts:
    """Read an identity's certificate. Raises BadInput naming the file that is damaged or the key that differs."""
    ca_pem, certificate_pem, key_pem = tls.read()
    authority = _parse(tls.ca, ca_pem)
    certificate = _parse(tls.certificate, certificate_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{tls.key} is no private key in PEM. `atoll certs` makes these files") from error
    if key.public_key() != certificate.public_key():
        raise BadInput(f"{tls.key} does not belong to {tls.certificate}. Copy both from the same folder")
    try:
        certificate.verify_directly_issued_by(authority)
        signed = True
    except (InvalidSignature, ValueError, TypeError):
        signed = False
    return Facts(_common_name(certificate), _hosts(certificate), certificate.not_valid_after_utc, signed_by_ca=signed)


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    valid: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _authority_identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise BadInput(
                f"host {host!r} is neither an address nor a name. Give it without port, e.g. 10.0.0.1"
            ) from None
        return x509.DNSName(host)


def _uri(role: Role, name: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(f"atoll://{role}/{name}")


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate_pem, key_pem = (folder / "ca.pem").read_bytes(), (folder / "ca-key.pem").read_bytes()
    except OSError as error:
        raise NotFound(
            f"no authority in {folder}: {error.filename}: {error.strerror}. Make one with `atoll certs init {folder}`"
        ) from error
    certificate = _parse(folder / "ca.pem", certificate_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{folder / 'ca-key.pem'} is no private key in PEM. Restore it from a backup") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise BadInput(f"{folder / 'ca-key.pem'} does not belong to {folder / 'ca.pem'}. Restore it from a backup")
    return certificate, key


def _parse(path: Path, pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise BadInput(f"{path} is no certificate in PEM. `atoll certs` makes these files") from error


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise Conflict(f"{path} is there already and was left as it is. Choose another folder, or move it away first")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make folder {folder}: {error.strerror}. Choose another one") from error


def _write(path: Path, content: bytes, *, mode: int) -> None:
    """Never over an existing file, and never readable for others for even a moment."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another folder") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # whatever the umask took away
        file.write(content)
        file.flush()
        os.fsync(descriptor)
