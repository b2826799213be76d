"""The revoked certificates of a cluster: an X.509 list, signed by its authority, beside the authority's own."""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.errors import BadInput

FILE: Final = "crl.pem"


def read(ca: Path) -> frozenset[int]:
    """Serial numbers of what is revoked by the list beside the certificate `ca`; none where there is no list.

    Raises BadInput for one that cannot be read, or that another authority signed."""
    path = ca.with_name(FILE)
    try:
        pem = path.read_bytes()
        authority = x509.load_pem_x509_certificate(ca.read_bytes())
        listed = x509.load_pem_x509_crl(pem)
        public = authority.public_key()
        signed = isinstance(public, ec.EllipticCurvePublicKey) and listed.is_signature_valid(public)
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}. `atoll certs revoke` makes it") from error
    if not signed:
        raise BadInput(f"{path} is not signed by {ca}. Copy both from the same authority")
    return frozenset(revoked.serial_number for revoked in listed)


def write(ca: Path, key: ec.EllipticCurvePrivateKey, serials: Collection[int], now: datetime.datetime) -> Path:
    """Sign a list of these, in place of the one beside `ca`. Raises BadInput where it cannot be written."""
    authority, path = x509.load_pem_x509_certificate(ca.read_bytes()), ca.with_name(FILE)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(authority.not_valid_after_utc)  # it counts until there is another one
    )
    for serial in sorted(serials):
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(revoked)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        fresh.chmod(0o644)
        os.replace(fresh, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Run it as the owner of that folder") from error
    return path
