"""Messages that wait: what cannot be is refused at once, and nobody waits for what does not come."""

from __future__ import annotations

import pytest

from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import BadInput, PeerLost
from atoll.strategies.staged_sums.mailbox import Awaited, StagedMailbox

FROM_BOTH = Awaited(1, (0, 2))


def opened(round_: int = 5) -> StagedMailbox:
    mailbox = StagedMailbox(["table", "last"], [100, 8], stages=4)
    mailbox.begin(round_)
    return mailbox


def came(mailbox: StagedMailbox, rank: int, round_: int = 5, *, tensor: int = 0, stage: int = 1, size: int = 3) -> None:
    assert mailbox.deliver(Kind.DIRECT, rank, round_, tensor, stage, bytes(size)) is None


def test_messages_are_taken_once_all_have_come_in_the_order_of_ranks() -> None:
    """The next round's may come before this one is over, as its sender needs nothing more; they wait."""
    mailbox = opened()
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
def test_what_cannot_be_is_refused_and_ends_the_wait(  # noqa: PLR0917 - the fields of a frame
    kind: int, round_: int, tensor: int, stage: int, size: int, says: str
) -> None:
    """Also where all that is waited for is there: nobody may go on without its sender."""
    mailbox = opened()
    came(mailbox, 2, stage=2)
    came(mailbox, 0)
    came(mailbox, 2)
    flaw = mailbox.deliver(kind, 2, round_, tensor, stage, bytes(size))
    assert flaw is not None
    with pytest.raises(BadInput, match=f"rank 2 sent a message that cannot be: .*{says}"):
        mailbox.wait([(0, FROM_BOTH)], 5.0)


def test_what_a_peer_sent_before_it_was_lost_counts_and_nothing_else_is_waited_for() -> None:
    mailbox = opened()
    came(mailbox, 0)
    came(mailbox, 2)
    mailbox.fail("rank 2 closed its connection")
    mailbox.wait([(0, FROM_BOTH)], 5.0)
    assert mailbox.take(0, FROM_BOTH) is not None
    with pytest.raises(PeerLost, match="rank 2 closed its connection"):
        mailbox.wait([(0, FROM_BOTH)], 5.0)


def test_who_sends_nothing_is_named_when_the_time_is_over() -> None:
    mailbox = opened()
    came(mailbox, 0)
    with pytest.raises(PeerLost, match="rank 2 sent nothing of table for 0 s"):
        mailbox.wait([(0, FROM_BOTH)], 0.05)
