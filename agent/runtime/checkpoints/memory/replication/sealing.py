"""Keeps others from reading, changing or forging copies on their way: AES-256-GCM, one key for each direction of
each pair of ranks.

Keys come of two X25519 agreements at once: between the keys that the controller gave the run's ranks, so that nobody
else can have them, and between keys that each sender makes for itself and forgets, so that what was recorded cannot
be read later by who gets hold of the run's. This is the pattern KK of the Noise framework (Perrin, 2018), the ephemeral
keys of both exchanged beforehand. A key seals each number at most once: senders never come twice with the same key."""

from __future__ import annotations

import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.agent.runtime.transport.keys import KEY_BYTES, Keys
from atoll.errors import NotAllowed

_NONCE: Final = struct.Struct("<4xQ")
_AES_BYTES: Final = 32
COPIES: Final = b"atoll copies of checkpoints 1"


class Seal:
    """One direction between two ranks: `seal` at one end, `open` at the other."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    @property
    def newest_number(self) -> int:
        """Newest number that was sealed, or opened."""
        return self._number

    def next_number(self) -> int:
        """Return the number for the head of the next message."""
        self._number += 1
        return self._number

    def seal(self, number: int, head: bytes, payload: bytes | memoryview) -> bytes:
        """payload, hidden, and 16 bytes that hold for it and for head. A number of `next_number`, each once."""
        return self._aead.encrypt(_NONCE.pack(number), payload, head)

    def open(self, number: int, head: bytes | memoryview, sealed: bytes | memoryview) -> bytes | None:
        """The payload; None where it is not what was sealed, or older than what was opened before."""
        if number <= self._number:
            return None
        try:
            payload = self._aead.decrypt(_NONCE.pack(number), sealed, head)
        except InvalidTag:
            return None
        self._number = number
        return payload


class Sealer:
    """One sender's part in the agreement."""

    def __init__(self, run: int, rank: int, keys: Keys, purpose: bytes = COPIES) -> None:
        """purpose: other keys for each."""
        self._run, self._rank, self._keys, self._purpose = run, rank, keys, purpose
        self._own = X25519PrivateKey.generate()
        self.ephemeral = self._own.public_key().public_bytes_raw()
        """What the others need to hear of this sender: 32 bytes, no secret."""

    def meet(self, rank: int, ephemeral: bytes) -> tuple[Seal, Seal]:
        """(towards `rank`, from `rank`). ephemeral: of its sender. Raises NotAllowed where that is no key."""
        try:
            fresh = self._own.exchange(X25519PublicKey.from_public_bytes(ephemeral))
            known = X25519PrivateKey.from_private_bytes(self._keys.secret).exchange(
                X25519PublicKey.from_public_bytes(self._keys.of[rank])
            )
        except (ValueError, KeyError) as error:
            raise NotAllowed(
                f"rank {rank} sent a key of {len(ephemeral)} bytes for copies of checkpoints that is none: {error}. Do "
                "all workers run the same version?"
            ) from error
        keys = HKDF(SHA256(), 2 * _AES_BYTES, salt=None, info=self._transcript(rank, ephemeral)).derive(fresh + known)
        upward, downward = Seal(keys[:_AES_BYTES]), Seal(keys[_AES_BYTES:])
        return (upward, downward) if self._rank < rank else (downward, upward)

    def _transcript(self, rank: int, ephemeral: bytes) -> bytes:
        """All that both ends know in the clear, in an order that is the same at both."""
        ends = sorted([(self._rank, self._keys.public, self.ephemeral), (rank, self._keys.of[rank], ephemeral)])
        assert all(len(key) == KEY_BYTES for _, *both in ends for key in both)
        numbers = struct.pack("<QII", self._run, ends[0][0], ends[1][0])
        return b"".join([self._purpose, numbers, *(key for _, *both in ends for key in both)])
