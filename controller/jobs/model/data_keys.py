"""The keys that encrypt a run's data between its workers: each rank's own, all from one secret seed of the run.

A seed is kept in the run's record, so that whichever controller leads hands out the same keys. Nothing here, nor what
comes out of it, may reach an event, a log or a message to users."""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES: Final = 32
KEY_BYTES: Final = 32


def new_seed() -> str:
    """A run's seed: 32 random bytes in hex."""
    return secrets.token_hex(SEED_BYTES)


def private_key(seed: str, job: str, run: int, rank: int) -> bytes:
    """A rank's X25519 private key, 32 bytes. seed: as `new_seed` made it."""
    info = f"atoll data key {job} {run} {rank}".encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes.fromhex(seed))


@lru_cache(maxsize=8)  # each launch of a run carries them all
def public_keys(seed: str, job: str, run: int, world_size: int) -> tuple[bytes, ...]:
    """The X25519 public keys of all ranks, 32 bytes each, by rank."""
    private = (private_key(seed, job, run, rank) for rank in range(world_size))
    return tuple(_public(key) for key in private)


def public_key(seed: str, job: str, run: int, rank: int) -> bytes:
    """One of them."""
    return _public(private_key(seed, job, run, rank))


def volunteers_secret(seed: str, job: str, run: int) -> bytes:
    """Return the secret of volunteers' tickets (atoll.security.volunteer_ticket), 32 bytes, which ranks have too."""
    info = f"atoll volunteers {job} {run}".encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(bytes.fromhex(seed))


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
