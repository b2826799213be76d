"""Random numbers as a function of (seed, rank, step): the same after a resume, an emergency or a change of members.

The generators are set anew at every step boundary. So no generator state has to be gathered or stored, and a
checkpoint that a survivor writes alone still continues every rank's dropout and augmentation exactly."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b

import torch

from atoll.errors import SettingError


def seed_alike(seed: int) -> None:
    """The same on every rank, so that models are built with equal initial weights: those of torch.manual_seed(seed)."""
    if not 0 <= seed < 2**64:
        raise SettingError("seed", seed, "must be at least 0 and below 2^64", "Any whole number in between will do")
    torch.manual_seed(seed)
    _seed_python(seed)


def seed_step(seed: int, rank: int, step: int) -> None:
    """Different on every rank and in every step."""
    words = b"".join(number.to_bytes(8, "little") for number in (seed, rank, step))
    mixed = int.from_bytes(blake2b(words, digest_size=8).digest(), "little")
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed takes 60 us, this 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed)
    _seed_python(mixed)


def _seed_python(value: int) -> None:
    random.seed(value)
    numpy = sys.modules.get("numpy")  # who has not imported it draws nothing from it
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
