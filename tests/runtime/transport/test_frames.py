"""The frame's own promise: what arrives is what was sent, or is refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.transport.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Flaw,
    Frame,
    FrameError,
    Kind,
    decode,
    encode,
)
from atoll.errors import BadInput

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
FRAMES = st.builds(Frame, st.sampled_from(Kind), U64, U64, U32, U32, U32, U32, st.binary(max_size=300))


@given(FRAMES)
def test_every_frame_comes_back_as_it_was(frame: Frame) -> None:
    header = encode(frame)
    assert len(header) == HEADER_BYTES
    assert decode(header, frame.payload) == frame
    assert decode(header, memoryview(frame.payload)).payload == frame.payload


@given(FRAMES, st.data())
def test_no_changed_byte_gets_through(frame: Frame, data: st.DataObject) -> None:
    message = bytearray(encode(frame) + frame.payload)
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    header, payload = bytes(message[:HEADER_BYTES]), bytes(message[HEADER_BYTES:])
    with pytest.raises(FrameError):
        decode(header, payload)


@given(FRAMES, st.integers(-3, 3).filter(bool))
def test_a_payload_that_was_cut_or_grew_is_damaged(frame: Frame, by: int) -> None:
    payload = bytes(frame.payload)
    changed = payload + b"x" * by if by > 0 else payload[:by]
    if changed != payload:
        with pytest.raises(FrameError, match="damaged"):
            decode(encode(frame), changed)


@given(st.binary(max_size=2 * HEADER_BYTES), st.binary(max_size=64))
def test_noise_is_refused(header: bytes, payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode(header, payload)


def test_another_version_is_said_to_be_one() -> None:
    header = bytearray(encode(Frame(Kind.PART, 1, 2, 3, 4, 5, 6, b"x")))
    header[4] = 2
    with pytest.raises(FrameError, match="this worker speaks version 1, not 2") as caught:
        decode(bytes(header), b"x")
    assert caught.value.reason is Flaw.VERSION


def test_what_fits_no_frame_is_not_sent() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD_BYTES + 1

    with pytest.raises(BadInput, match="too large to send"):
        encode(Frame(Kind.PART, 1, 1, 1, 1, 1, 1, Huge()))
    with pytest.raises(BadInput, match="tensor 4294967296 fits no frame"):
        encode(Frame(Kind.PART, 1, 1, 2**32, 1, 1, 1, b""))
