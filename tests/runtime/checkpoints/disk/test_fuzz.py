"""Checkpoints on disk and from peers that somebody tampered with who can compute hashes: whole or refused in words."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))  # for mutated

from mutated import mutated

from atoll.agent.runtime.checkpoints.disk import manifest, transfer
from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.manifest import Manifest
from atoll.agent.runtime.checkpoints.disk.state import pack_state, unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import Hasher, deserialized, serialized
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.errors import AtollError

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor([3])}
STATE = {"model": MODEL, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99), "state": {0: {"step": 3}}}}
TENSORS, SCALARS = pack_state(STATE)
HEADER = Header(
    job="tiny", run=3, step=9, epoch=0, consumed=1, loader_step=9, world_size=1, seed=7, model=fingerprint(MODEL)
)


def content() -> tuple[bytes, Hasher]:
    hasher, parts = Hasher(), []
    for part in serialized(TENSORS):
        hasher.update(part)
        parts.append(bytes(part))
    return b"".join(parts), hasher


STATE_BYTES, HASHER = content()
SOUND = manifest.to_bytes(Manifest(HEADER, SCALARS, {manifest.STATE_FILE: HASHER.content()}))
BODY = {name: value for name, value in json.loads(SOUND).items() if name != "xxh3_128"}
LISTED = json.loads(STATE_BYTES[8 : 8 + int.from_bytes(STATE_BYTES[:8], "little")])
LISTING = transfer.listed(LoadedCheckpoint(HEADER, TENSORS, SCALARS))
ALL = LISTING.lacking({})
WHOLE = transfer.to_bytes(LISTING) + transfer.gathered(LISTING, ALL, TENSORS).tobytes()
SAID_BYTES = len(WHOLE) - LISTING.sent_bytes(ALL)
SAID = {name: value for name, value in json.loads(WHOLE[:SAID_BYTES]).items() if name != "xxh3_128"}


def sealed(body: Any) -> bytes:
    text = json.dumps(body).encode()[:-1]
    return text + b', "xxh3_128": "%s"}\n' % xxhash.xxh3_128_hexdigest(text).encode()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutated(BODY))
def test_a_manifest_with_sound_hashes_is_read_or_refused_in_words(body: Any) -> None:
    try:
        found = manifest.from_bytes(sealed(body))
        unpack_state(TENSORS, found.scalars)
    except AtollError:
        return
    assert 0 <= found.header.run < 2**63


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutated(LISTED))
def test_a_list_of_tensors_is_read_or_refused_in_words(listed: Any) -> None:
    raw = json.dumps(listed).encode()
    data = STATE_BYTES[8 + int.from_bytes(STATE_BYTES[:8], "little") :]
    file = len(raw).to_bytes(8, "little") + raw + data
    try:
        tensors, _ = deserialized(io.BytesIO(file), len(file))
    except AtollError:
        return
    assert sum(one.numel() * one.element_size() for one in tensors.values()) == len(data)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_what_a_peer_sends_is_the_checkpoint_or_refused(data: st.DataObject) -> None:
    sent = bytearray(WHOLE)
    at, run = data.draw(st.integers(0, len(sent) - 1)), data.draw(st.integers(1, 64))
    match data.draw(st.sampled_from(["flip", "zero", "drop", "double", "swap"])):
        case "flip":
            sent[at] ^= 1 << data.draw(st.integers(0, 7))
        case "zero":
            sent[at : at + run] = bytes(len(sent[at : at + run]))
        case "drop":
            del sent[at : at + run]
        case "double":
            sent[at:at] = sent[at : at + run]
        case _:
            sent[at : at + run] = sent[at : at + run][::-1]
    try:
        listing = transfer.from_bytes(bytes(sent[:SAID_BYTES]))
        checkpoint = listing.read(ALL, np.frombuffer(bytearray(sent[SAID_BYTES:]), np.uint8), {})
    except AtollError:
        return
    assert bytes(sent) == WHOLE
    assert checkpoint.header == HEADER


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mutated(SAID))
def test_a_peers_list_with_sound_hashes_is_read_or_refused_in_words(body: Any) -> None:
    try:
        listing = transfer.from_bytes(sealed(body))
        found = listing.read([True] * len(listing.tensors), np.frombuffer(bytearray(WHOLE[SAID_BYTES:]), np.uint8), {})
    except AtollError:
        return
    assert [one.name for one in listing.tensors] == list(found.tensors)
