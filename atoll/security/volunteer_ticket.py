"""Proofs that volunteers show: tokens with which their agents join, tickets by which ranks know the controller's word.

Both are made of a secret that volunteers do not have, and of the one name that they are good for."""

from __future__ import annotations

import hmac
from typing import Final

TICKET_BYTES: Final = 32


def ticket(secret: bytes, name: str) -> bytes:
    """secret: of the run, 32 bytes, which its ranks have too. name: of the volunteer's device."""
    return hmac.digest(secret, f"atoll volunteer {name}".encode(), "sha256")


def is_ticket(secret: bytes, name: str, shown: bytes) -> bool:
    return hmac.compare_digest(ticket(secret, name), shown)


def token(join_token: str, node: str) -> str:
    """Return the token with which a node can join only as a volunteer. join_token: the cluster's."""
    return f"volunteer-{hmac.digest(join_token.encode(), f'atoll volunteer token {node}'.encode(), 'sha256').hex()}"


def is_token(join_token: str, node: str, shown: str) -> bool:
    return hmac.compare_digest(token(join_token, node).encode(), shown.encode())
