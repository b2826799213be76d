from __future__ import annotations

import pytest

from atoll.agent.runtime.checkpoints.memory.replication.sealing import Seal, Sealer
from atoll.agent.runtime.transport.keys import Keys, generate
from atoll.errors import NotAllowed


def keys(count: int) -> list[Keys]:
    pairs = [generate() for _ in range(count)]
    public = dict(enumerate(own for _, own in pairs))
    return [Keys(secret=secret, public=public[rank], of=public) for rank, (secret, _) in enumerate(pairs)]


def pair(ours: Keys, theirs: Keys, run: int = 1, their_run: int = 1) -> tuple[Seal, Seal]:
    """(rank 0's end, rank 1's end) of what goes from rank 0 to rank 1."""
    zero, one = Sealer(run, 0, ours), Sealer(their_run, 1, theirs)
    return zero.meet(1, one.ephemeral)[0], one.meet(0, zero.ephemeral)[1]


def test_what_one_rank_sealed_the_other_opens_in_order() -> None:
    towards, back = pair(*keys(2))
    for payload in (b"first", b"", bytes(100_000)):
        number = towards.next_number()
        assert back.open(number, b"head", towards.seal(number, b"head", payload)) == payload


def test_both_directions_and_all_runs_have_keys_of_their_own() -> None:
    own = keys(2)
    zero, one = Sealer(1, 0, own[0]), Sealer(1, 1, own[1])
    towards, back = zero.meet(1, one.ephemeral)
    sealed = towards.seal(1, b"", b"payload")
    assert back.open(1, b"", sealed) is None  # sent back to who sealed it
    assert one.meet(0, Sealer(1, 0, own[0]).ephemeral)[1].open(1, b"", sealed) is None  # a later sender's
    towards, back = pair(*own, their_run=2)
    assert back.open(1, b"", towards.seal(1, b"", b"payload")) is None


def test_what_was_changed_or_comes_again_is_not_opened() -> None:
    towards, back = pair(*keys(2))
    first, second = (towards.seal(number, b"head", b"payload") for number in (1, 2))
    assert back.open(1, b"another head", first) is None
    assert back.open(1, b"head", first[:-1] + bytes([first[-1] ^ 1])) is None
    assert back.open(2, b"head", first) is None
    assert back.open(1, b"head", b"short") is None
    assert back.open(2, b"head", second) == b"payload"
    assert back.open(2, b"head", second) is None
    assert back.open(1, b"head", first) is None


def test_who_has_not_the_runs_key_seals_nothing_that_opens() -> None:
    """Not even with a key of its own making in the place of a sender's."""
    ours, theirs = keys(2), keys(2)
    stranger = Keys(secret=theirs[0].secret, public=ours[0].public, of=ours[0].of)
    towards, back = pair(stranger, ours[1])
    assert back.open(1, b"", towards.seal(1, b"", b"payload")) is None


@pytest.mark.parametrize("ephemeral", [b"", bytes(31), bytes(32)])
def test_a_key_that_is_none_is_refused(ephemeral: bytes) -> None:
    """Too short, or a point with which every secret gives the same."""
    with pytest.raises(NotAllowed, match="rank 1 sent a key"):
        Sealer(1, 0, keys(2)[0]).meet(1, ephemeral)
