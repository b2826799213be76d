"""Whether all islands but the one with the thinnest link learn sooner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput, steps_for_one_at
from atoll.controller.planners.islands.one_island import MIN_SAVING, IslandTimes
from atoll.controller.planners.islands.thin_island import ThinIslandInput, ThinIslandPlan, compare_thin_island
from atoll.controller.planners.registry import THIN_ISLAND
from atoll.errors import BadInput

ENTRIES = 25_000_000
STEP_S = 0.4
WIDE = 12_500_000
"""Bytes a second. That carries all that teaches anything."""


def asked(*links: float, batches: tuple[int, ...] = (), density: float | None = None, **fields: Any) -> ThinIslandInput:
    names = "abcdefgh"
    given = batches or (64,) * len(links)
    return ThinIslandInput(
        islands=tuple(
            IslandTimes(name=name, batch=batch, compute_s=STEP_S) for name, batch in zip(names, given, strict=False)
        ),
        exchange=ExchangeDensityInput(
            entries=ENTRIES, bandwidths=links, step_s=STEP_S, value_bytes=0.2578125, enough=0.2, density=density
        ),
        **fields,
    )


def compared(*links: float, **fields: Any) -> ThinIslandPlan:
    return compare_thin_island(asked(*links, **fields))


def test_a_link_of_a_hundredth_of_what_teaches_costs_more_than_a_fourth_island_brings() -> None:
    planned = compared(WIDE, WIDE, WIDE / 100, WIDE)
    assert (planned.island, planned.leaves) == ("c", True)
    assert planned.without_s == pytest.approx(STEP_S * 4 / 3)  # three share the batch of four, and send enough
    assert planned.density_without == 0.2
    assert planned.density < 0.2 / 20
    assert planned.together_s == pytest.approx(STEP_S * steps_for_one_at(planned.density))


def test_links_that_carry_all_that_teaches_leave_nobody_out_however_unequal() -> None:
    planned = compared(WIDE, 100 * WIDE, 100 * WIDE)
    assert not planned.leaves
    assert planned.together_s == pytest.approx(STEP_S)
    assert planned.density == planned.density_without == 0.2


def test_equally_thin_links_leave_nobody_out() -> None:
    planned = compared(*(WIDE / 1000,) * 4)
    assert not planned.leaves
    assert planned.without_s > planned.together_s


def test_an_island_that_computes_most_is_worth_a_thin_link() -> None:
    thin = (WIDE / 200, WIDE, WIDE)
    assert compared(*thin, batches=(16, 120, 120)).leaves
    assert not compared(*thin, batches=(240, 8, 8)).leaves


def test_of_equally_thin_links_the_island_goes_that_computes_least() -> None:
    assert compared(WIDE, WIDE / 500, WIDE / 500, batches=(64, 64, 8)).island == "c"


def test_a_link_that_does_not_even_carry_the_least_holds_the_step_itself() -> None:
    planned = compared(WIDE, WIDE, WIDE / 1e6)
    assert planned.leaves
    assert planned.together_s > 10 * planned.without_s


def test_a_pinned_density_teaches_the_same_without_the_island_unless_the_link_holds_the_step() -> None:
    assert not compared(WIDE, WIDE, WIDE / 10, density=0.01).leaves
    held = compared(WIDE, WIDE, WIDE / 1000, density=0.1)
    assert held.leaves
    assert held.density == held.density_without == 0.1


def test_it_leaves_only_clearly_beyond_what_is_unsure_and_what_it_costs() -> None:
    links = (WIDE, WIDE, WIDE / 100, WIDE)
    planned = compared(*links)
    doubt = (planned.together_s * (1 - MIN_SAVING) / planned.without_s - 1) / 2
    assert compared(*links, uncertainty=doubt * 0.99).leaves
    assert not compared(*links, uncertainty=doubt * 1.01).leaves
    dear = 1 - planned.without_s / (planned.together_s * (1 - MIN_SAVING))
    assert compared(*links, cost=dear * 0.99).leaves
    assert not compared(*links, cost=dear * 1.01).leaves


@pytest.mark.parametrize(
    ("links", "islands", "said"),
    [((WIDE, WIDE), 2, "at least 3"), ((WIDE, WIDE), 3, "3 islands, but 2 bandwidths in field 'exchange'. Give one")],
)
def test_too_few_islands_or_links_are_refused(links: tuple[float, ...], islands: int, said: str) -> None:
    given = asked(WIDE, WIDE, WIDE).model_dump(mode="json", exclude_none=True)
    given["islands"] = given["islands"][:islands]
    given["exchange"]["bandwidths"] = links
    with pytest.raises(BadInput, match=said):
        THIN_ISLAND.run_json(json.dumps(given))
