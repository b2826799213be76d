from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.data.split import split_batch
from atoll.errors import BadInput

shares_of_ranks = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=9)


@given(st.integers(0, 5000), shares_of_ranks)
def test_every_sample_goes_to_one_rank_and_no_rank_is_far_from_its_quota(total: int, shares: list[float]) -> None:
    counts = split_batch(total, shares)
    assert sum(counts) == total
    assert len(counts) == len(shares)
    if total >= len(shares):
        assert min(counts) >= 1
    quotas = [total * share / math.fsum(shares) for share in shares]
    if total < len(shares) or min(quotas) >= 1:
        assert all(math.floor(q - 1e-6) <= c <= math.ceil(q + 1e-6) for q, c in zip(quotas, counts, strict=True))


@given(st.integers(0, 200), shares_of_ranks, st.integers(2, 5))
def test_a_rank_has_nothing_or_the_least_that_it_can_train(total: int, shares: list[float], least: int) -> None:
    counts = split_batch(total, shares, least)
    assert sum(counts) == total
    assert total < least or all(count == 0 or count >= least for count in counts)
    assert total < least * len(shares) or min(counts) >= least
    alone = split_batch(total, shares)
    if min(alone) >= least:
        assert counts == alone


def test_no_rank_has_a_single_sample_where_two_are_the_least() -> None:
    """1. BatchNorm1d refuses one sample. 2. It had one in a last batch of 3 over 2 ranks, with shares of 63:1, and
    where the batch has fewer than two for each. 3. Now it has two, or none where two for each do not exist."""
    assert split_batch(3, [1, 1], 2) == [3, 0]
    assert split_batch(3, [1, 2], 2) == [0, 3]
    assert split_batch(64, [63, 1], 2) == [62, 2]
    assert split_batch(5, [1, 1, 1], 2) == [3, 2, 0]
    assert split_batch(4, [5, 1, 1, 1], 2) == [2, 2, 0, 0]
    assert split_batch(1, [1, 1], 2) == [1, 0]


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=64))
def test_whole_shares_that_sum_to_the_batch_come_back_as_they_are(shares: list[int]) -> None:
    assert split_batch(sum(shares), [float(share) for share in shares]) == shares


@given(st.integers(0, 500), shares_of_ranks, st.integers(-20, 20))
def test_shares_are_relative(total: int, shares: list[float], exponent: int) -> None:
    assert split_batch(total, shares) == split_batch(total, [math.ldexp(share, exponent) for share in shares])


def test_ties_go_to_the_lower_rank() -> None:
    assert split_batch(10, [1, 1, 1]) == [4, 3, 3]
    assert split_batch(2, [1, 1, 1]) == [1, 1, 0]


def test_a_tiny_share_still_gets_one_sample_and_the_rest_keep_their_ratio() -> None:
    assert split_batch(10, [1e-9, 2, 1]) == [1, 6, 3]
    assert split_batch(3, [1e-300, 1e300, 1.0]) == [1, 1, 1]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_share_that_is_no_share_is_refused_with_its_rank(bad: float) -> None:
    with pytest.raises(BadInput, match="rank 1"):
        split_batch(8, [1.0, bad])


def test_no_shares_and_negative_batches_are_refused() -> None:
    with pytest.raises(BadInput, match="no shares"):
        split_batch(8, [])
    with pytest.raises(BadInput, match="-1 samples"):
        split_batch(-1, [1.0])
