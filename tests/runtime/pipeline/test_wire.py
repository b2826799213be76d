"""Messages between stages: tensors of any shape as they were, and nothing taken that no neighbour sends."""

from __future__ import annotations

import threading

import pytest
import torch

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.wire import StageLinks, StageMailbox, StageMessage, StagePurpose, packed, unpacked
from atoll.agent.runtime.rounding import Form
from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost

MIDDLE = StagePlace(4, stages=3, pipelines=2)  # between ranks 3 and 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4, 5)])
def test_a_tensor_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape).to(dtype)
    found = unpacked(packed(StagePurpose.FORWARD, sent))
    assert (found.dtype, found.shape) == (dtype, sent.shape)
    assert torch.equal(found, sent)


@pytest.mark.parametrize(("form", "bytes_of_one"), [("bfloat16", 2.0), ("int8", 1.0 + 4 / 64)])
def test_over_thin_links_it_arrives_rounded_in_its_own_dtype_and_shape(form: Form, bytes_of_one: float) -> None:
    """Floating-point ones of some size, that is: what is small or whole numbers arrives as it was."""
    sent = torch.randn(6, 40, 8)
    message = packed(StagePurpose.FORWARD, sent, form)
    assert len(message) == 8 + 3 * 8 + bytes_of_one * sent.numel()
    found = unpacked(message)
    assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
    assert 0 < float((found - sent).norm() / sent.norm()) < 0.01
    for other in (sent[0], (100 * sent).long(), sent.double(), sent.bfloat16(), torch.empty(0, 3)):
        assert torch.equal(unpacked(packed(StagePurpose.FORWARD, other, form)), other)
    with pytest.raises(PeerLost, match=f"malformed: .* as {form}"):
        unpacked(message[:-1])


def test_only_the_neighbours_on_other_islands_are_behind_thin_links() -> None:
    sizes: dict[int, int] = {}
    links = StageLinks(
        MIDDLE,
        lambda to, round_, batch, micro, payload: sizes.update({to: len(payload)}),
        deadline_s=60,
        form="bfloat16",
        thin={5},
    )
    for purpose in (StagePurpose.FORWARD, StagePurpose.BACKWARD):
        links.send(purpose, 0, 0, torch.randn(64, 64))
    assert sizes == {5: 24 + 2 * 64 * 64, 3: 24 + 4 * 64 * 64}


def test_what_cannot_be_sent_or_is_torn_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be sent"):
        packed(StagePurpose.FORWARD, torch.zeros(2, dtype=torch.complex64))
    whole = packed(StagePurpose.FORWARD, torch.zeros(3, 5))
    for size in (8, 12, 24, len(whole) - 1):
        with pytest.raises(PeerLost, match="malformed"):
            unpacked(whole[:size])


def test_only_neighbours_are_heard_and_each_message_once() -> None:
    mailbox = StageMailbox(MIDDLE)
    mailbox.begin(5)
    body = bytes(packed(StagePurpose.FORWARD, torch.zeros(2)))
    back = bytes(packed(StagePurpose.BACKWARD, torch.zeros(2)))
    deliver = mailbox.deliver
    assert deliver(Kind.DIRECT, 3, 5, 0, 1, body) is None
    assert deliver(Kind.DIRECT, 3, 5, 0, 1, body) == "twice"
    assert deliver(Kind.DIRECT, 5, 5, 0, 1, body) == "none of its neighbours"  # a later stage goes not forward
    assert deliver(Kind.DIRECT, 1, 5, 0, 1, body) == "none of its neighbours"  # of another pipeline
    assert deliver(Kind.DIRECT, 5, 5, 0, 1, back) is None
    assert deliver(Kind.DIRECT, 3, 4, 0, 1, body) == "old step"
    assert deliver(Kind.DIRECT, 3, 7, 0, 1, body) == "step too far ahead"
    assert deliver(Kind.DIRECT, 3, 5, 0, 1, b"") == "malformed"
    assert deliver(Kind.DIRECT, 3, 5, 0, 1, b"\xff" * 40) == "malformed"
    assert mailbox.take(StageMessage(5, 0, StagePurpose.FORWARD, 1, 3), 0.1) == body
    with pytest.raises(PeerLost, match=r"rank 3 sent no FORWARD of a batch for 0 s"):
        mailbox.take(StageMessage(5, 0, StagePurpose.FORWARD, 2, 3), 0.01)


def test_a_lost_peer_wakes_who_waits() -> None:
    mailbox = StageMailbox(MIDDLE)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(PeerLost) as caught:
            mailbox.take(StageMessage(0, 0, StagePurpose.FORWARD, 0, 3), 30.0)
        said.append(str(caught.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    mailbox.fail("rank 3 is gone")
    waiter.join(timeout=30)
    assert said == ["rank 3 is gone"]
