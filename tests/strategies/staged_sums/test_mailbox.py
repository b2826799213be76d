"""Messages in stages: an impossible one is refused at once, and no sum waits for messages that do not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost
from atoll.strategies.staged_sums.exchange import StagedExchange, Steps
from atoll.strategies.staged_sums.mailbox import Awaited, Message, StagedMailbox

FROM_BOTH = Awaited(1, (0, 2))


class NoSender:
    def send(self, to: int, number: int, tensor: int, count: int, payload: memoryview, /) -> None:
        raise AssertionError("these sums send nothing")


@pytest.fixture
def exchange() -> Iterator[StagedExchange]:
    """In round 5. Its thread starts with a test's `start`."""
    made = StagedExchange(NoSender(), ["table", "last"], [100, 8], stages=4)
    made.begin(5)
    yield made
    made.close()


def lengths() -> Steps[list[int]]:
    """Sum that waits for messages of ranks 0 and 2, and returns their lengths."""
    messages: list[Message] = yield FROM_BOTH
    return [len(one) for one in messages]


def ended(_: object) -> None: ...


def came(mailbox: StagedMailbox, rank: int, round_: int = 5, *, tensor: int = 0, stage: int = 1, size: int = 3) -> None:
    assert mailbox.deliver(Kind.DIRECT, rank, round_, tensor, stage, bytes(size)) is None


def test_messages_are_taken_once_all_have_come_in_the_order_of_ranks(exchange: StagedExchange) -> None:
    """The next round's may come before this one is over, as its sender needs nothing more; they wait."""
    mailbox = exchange.mailbox
    came(mailbox, 2, size=2)
    assert mailbox.take(0, FROM_BOTH) is None
    assert mailbox.silent(0, FROM_BOTH) == 0
    came(mailbox, 0, round_=6)
    came(mailbox, 0, size=7)
    taken = mailbox.take(0, FROM_BOTH)
    assert taken is not None
    assert [len(one) for one in taken] == [7, 2]
    mailbox.begin(6)
    assert mailbox.silent(0, FROM_BOTH) == 2


@pytest.mark.parametrize(
    ("kind", "round_", "tensor", "stage", "size", "says"),
    [
        (Kind.DIRECT, 5, 0, 1, 101, "101 bytes of table, of which no message has more than 100"),
        (Kind.DIRECT, 5, 1, 1, 9, "9 bytes of last, of which no message has more than 8"),
        (Kind.DIRECT, 5, 2, 1, 3, "tensor 2"),
        (Kind.DIRECT, 5, 0, 4, 3, "stage 4"),
        (Kind.DIRECT, 4, 0, 1, 3, "it is of round 4, in round 5"),
        (Kind.DIRECT, 7, 0, 1, 3, "it is of round 7, in round 5"),
        (Kind.DIRECT, 2**32 - 1, 0, 1, 3, "it is of round 4294967295"),
        (Kind.DIRECT, 5, 0, 2, 3, "a second one of table, stage 2"),
        (Kind.DIRECT + 1, 5, 0, 1, 3, "kind"),
    ],
)
def test_an_impossible_message_is_refused_and_ends_the_sums(  # noqa: PLR0917 - the fields of a frame
    exchange: StagedExchange, kind: int, round_: int, tensor: int, stage: int, size: int, says: str
) -> None:
    """Also where all that is waited for is there: no rank may continue without its sender."""
    mailbox = exchange.mailbox
    came(mailbox, 2, stage=2)
    came(mailbox, 0)
    came(mailbox, 2)
    flaw = mailbox.deliver(kind, 2, round_, tensor, stage, bytes(size))
    assert flaw is not None
    exchange.start()
    sum_ = exchange.submit(0, lengths(), ended)
    with pytest.raises(BadInput, match=f"rank 2 sent a message that cannot be: .*{says}"):
        exchange.finish(sum_, 5.0)


def test_messages_of_a_lost_peer_count_and_no_others_are_waited_for(exchange: StagedExchange) -> None:
    came(exchange.mailbox, 0)
    came(exchange.mailbox, 2)
    complete, lacking = exchange.submit(0, lengths(), ended), exchange.submit(1, lengths(), ended)
    exchange.mailbox.fail("rank 2 closed its connection")
    exchange.start()
    assert exchange.finish(complete, 5.0) == [3, 3]
    with pytest.raises(PeerLost, match="rank 2 closed its connection"):
        exchange.finish(lacking, 5.0)


def test_a_silent_rank_is_named_when_the_time_is_over(exchange: StagedExchange) -> None:
    came(exchange.mailbox, 0)
    exchange.start()
    sum_ = exchange.submit(0, lengths(), ended)
    with pytest.raises(PeerLost, match="rank 2 sent nothing of table for 0 s"):
        exchange.finish(sum_, 0.2)


def test_a_sum_continues_whenever_a_message_comes(exchange: StagedExchange) -> None:
    """Sums end in any order; the training thread is told of each."""
    told: list[object] = []
    exchange.start()
    first, second = exchange.submit(0, lengths(), told.append), exchange.submit(1, lengths(), told.append)
    for tensor in (1, 0):
        for rank in (2, 0):
            came(exchange.mailbox, rank, tensor=tensor, size=2 + rank)
    assert exchange.finish(first, 5.0) == exchange.finish(second, 5.0) == [2, 4]
    assert len(told) == 2


def test_a_sum_that_fails_ends_the_others_too(exchange: StagedExchange) -> None:
    def impossible() -> Steps[int]:
        yield FROM_BOTH
        raise BadInput("rank 0 sent a message that cannot be: it is empty")

    exchange.start()
    failing, other = exchange.submit(0, impossible(), ended), exchange.submit(1, lengths(), ended)
    came(exchange.mailbox, 0)
    came(exchange.mailbox, 2)
    for sum_ in (failing, other):
        with pytest.raises(BadInput, match="table: rank 0 sent a message that cannot be: it is empty"):
            exchange.finish(sum_, 5.0)
