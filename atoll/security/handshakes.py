"""Explains failed TLS handshakes to a user: gRPC tells them as text only."""

from __future__ import annotations

import datetime
import re
from typing import Final

from atoll.network.rpc import Tls


def certificate_problem(details: str) -> str | None:
    """Explain a failed TLS handshake; None if the failure is another one."""
    text = details.upper()
    if "CERTIFICATE_VERIFY_FAILED" in text or "HOSTNAME VERIFICATION" in text:
        return (
            "its certificate was refused (wrong CA, expired, or made for another host). "
            "Compare --tls-ca with the cluster's ca.pem, and `atoll certs server --host` with this address"
        )
    if "WRONG_VERSION_NUMBER" in text:
        return "it speaks without TLS. Leave the --tls options and ATOLL_TLS_DIR out, or give it certificates"
    return None


# In TLS 1.3 the server judges the client's certificate after the client's handshake is done: all that a refused client
# sees is a connection that ends. One without TLS sees the same.
_ENDED_AT_ONCE: Final = re.compile(r"(Socket closed|Connection reset by peer)( \(\d+\))?$")


def ended_at_once(details: str) -> bool:
    """Return True if every connection failed because the other side ended it."""
    return "failed to connect" in details and _ENDED_AT_ONCE.search(details) is not None


def refused_in_silence(tls: Tls | None) -> str:
    """Explain why a controller ends every connection at once, as far as this side knows. tls: this side's identity."""
    if tls is None:
        return (
            "ends connections at once, as a controller with certificates does. "
            "Name yours with --tls-ca, --tls-cert and --tls-key, or their folder in ATOLL_TLS_DIR"
        )
    from atoll.security.certificates import read_facts

    facts = read_facts(tls)
    if facts.not_after < datetime.datetime.now(datetime.UTC):
        return (
            f"refused the certificate {tls.certificate}: it expired on {facts.not_after:%Y-%m-%d}. "
            "Make a new one with `atoll certs`"
        )
    return (
        f"refused the certificate {tls.certificate} of {facts.common_name}. "
        "Make one with the cluster's own authority: `atoll certs client DIR NAME`, "
        "for an agent `atoll certs agent DIR NODE`"
    )
