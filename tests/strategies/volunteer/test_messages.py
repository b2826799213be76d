from __future__ import annotations

import pytest
import torch

from atoll.errors import BadInput
from atoll.strategies.volunteer import messages


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"no json"],
        [b"[]"],
        [b"{}", b"short"],
        [b"{}", b"\x00\xff" + b"\x00" * 20],
        [b"{}", bytes([16, 0, 2, 0, 0, 0, 0, 0]) + b"\x00" * 8 + b"\xff" * 8],  # no entries, and a size beyond int64
        [b"x" * (messages.MAX_HEADER_BYTES + 1)],
        [b"{}"] * (messages.MAX_TENSORS + 2),
        [b"{}", b"\x00" * (messages.MAX_TENSOR_BYTES + 1)],
    ],
)
def test_messages_that_are_none_are_dropped(frames: list[bytes]) -> None:
    with pytest.raises(BadInput, match="dropped"):
        messages.read(frames)


def test_a_message_is_read_as_it_was_written() -> None:
    header, tensors = messages.read(messages.written({"number": 3}, [torch.arange(3.0), torch.tensor([1, 2])]))
    assert messages.number(header, "number") == 3
    assert [one.tolist() for one in tensors] == [[0.0, 1.0, 2.0], [1, 2]]
    for wrong in (-1, "3", None, 2**60):
        with pytest.raises(BadInput, match="is no number"):
            messages.number({"number": wrong}, "number")
