"""The costs of links from view to view: what holds, and whose are measured."""

from __future__ import annotations

import pytest

from atoll.strategies.compressed.costs.link_costs import AgreedCosts, LearnedCosts, LinkCosts


def learned(link: tuple[float, float], rounds: int = 40, *, ranks: int = 3, took_part: bool = True) -> bytes:
    """All-reduces take twice as long for a byte, and three times to begin."""
    links = LinkCosts(list(link), [3 * link[0], 2 * link[1]], ranks)
    return LearnedCosts(links=links, took_part=took_part, rounds=rounds).packed()


def test_ranks_that_know_nothing_measure() -> None:
    assert AgreedCosts.of([b"", b""], [0, 1]) is None
    assert AgreedCosts.of([learned((1e-3, 1e-7), took_part=False), b""], [0, 1]) is None


def test_those_who_are_left_know_all_links_and_tell_the_least_that_was_measured() -> None:
    """An all-reduce of two has half the turns of one of three, each of half the bytes in place of a third."""
    agreed = AgreedCosts.of([learned((2e-3, 1e-7), 40), learned((1e-3, 3e-7), 41)], [0, 1])
    assert agreed is not None
    assert (agreed.new, agreed.rounds) == ((), 41)
    assert agreed.links.link == [1e-3, 1e-7]
    assert agreed.links.allreduce == pytest.approx([3 * 1e-3 / 2, 2 * 1e-7 * 3 / 4])
    assert agreed.links.ranks == 2


def test_who_joins_is_new_and_so_is_who_speaks_for_an_island_since_its_first_rank_was_lost() -> None:
    told = [learned((1e-3, 1e-7)), learned((1e-3, 1e-7), took_part=False), b"", b""]
    agreed = AgreedCosts.of(told, [0, 1, 3])
    assert agreed is not None
    assert (agreed.known, agreed.new) == (0, (1, 3))
    first_alone = AgreedCosts.of([b"", learned((1e-3, 1e-7))], [0, 1])
    assert first_alone is not None
    assert (first_alone.known, first_alone.new) == (1, (0,))


def test_what_views_of_different_sizes_measured_is_brought_to_this_one() -> None:
    """A rank that a view broke off for has what was known before it."""
    of_two, of_three = learned((1e-3, 1e-7), ranks=2), learned((1e-3, 1e-7), ranks=3)
    agreed = AgreedCosts.of([of_two, of_three], [0, 1])
    assert agreed is not None
    assert agreed.links.allreduce == pytest.approx([3e-3 / 2, 2e-7 * 3 / 4])


def test_a_slower_link_slows_all_down_and_a_faster_one_none() -> None:
    links = LinkCosts([1e-3, 1e-7], [3e-3, 2e-7], 3)
    assert links.slowed_to([2e-3, 4e-7]) == LinkCosts([2e-3, 4e-7], [3e-3, 8e-7], 3)
    assert links.slowed_to([1e-4, 1e-8]) == links
    assert LinkCosts([1e-3, 0.0], [1e-3, 0.0], 2).slowed_to([1e-3, 1e-7]).link == [1e-3, 1e-7]


def test_there_and_back_between_sizes_is_the_same() -> None:
    links = LinkCosts([1e-3, 1e-7], [3e-3, 2e-7], 4)
    again = links.among(9).among(4)
    assert again.allreduce == pytest.approx(links.allreduce)
    assert again.link == links.link
