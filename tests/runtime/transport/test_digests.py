from __future__ import annotations

import pytest

from atoll.agent.runtime.transport.digests import KEPT_ROUNDS, Digests
from atoll.errors import WeightsDiffer

NAMES = ["first.weight", "first.bias"]


def two() -> tuple[Digests, Digests, list[tuple[int, bytes]]]:
    said: list[tuple[int, bytes]] = []
    return (
        Digests(0, NAMES, lambda number, payload: None),
        Digests(1, NAMES, lambda number, payload: said.append((number, payload))),
        said,
    )


def test_equal_digests_are_counted_and_say_nothing() -> None:
    mine, theirs, said = two()
    mine.take([(10, 1, 22)])
    mine.take([(10, 0, 11)])
    theirs.take([(10, 0, 11), (10, 1, 22)])
    (word,) = said
    assert mine.check() == 0
    assert mine.hear(word[0], 1, word[1]) is None
    assert mine.check() == 1
    assert mine.check() == 0, "each pair is compared once"


def test_a_difference_names_the_tensor_the_ranks_and_the_pass() -> None:
    mine, theirs, said = two()
    mine.take([(10, 0, 11), (10, 1, 22)])
    theirs.take([(10, 0, 11), (10, 1, 23)])
    mine.hear(said[0][0], 1, said[0][1])
    with pytest.raises(WeightsDiffer, match=r"first\.bias differ between ranks 0 and 1 after sync round 10 \(1 of 2"):
        mine.check()


def test_nothing_is_told_before_all_tensors_are_there() -> None:
    _, theirs, said = two()
    theirs.take([(10, 0, 11), (20, 0, 12)])
    assert said == []
    theirs.take([(20, 1, 13)])
    assert [number for number, _ in said] == [20]


def test_words_of_another_model_are_refused() -> None:
    mine, _, _ = two()
    assert mine.hear(10, 1, b"12345678") == "malformed"


def test_a_peer_that_runs_ahead_fills_no_memory() -> None:
    mine, _, _ = two()
    for number in range(10 * KEPT_ROUNDS):
        mine.hear(number, 1, bytes(16))
        mine.check()
    assert len(mine._known) <= KEPT_ROUNDS
