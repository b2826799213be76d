"""When a volunteer's link is thin enough for fewer bytes, and when it is told to wait."""

from __future__ import annotations

import math

import pytest

from atoll.agent.runtime.rounding import Form
from atoll.strategies.volunteer.link_use import (
    JUDGED_BYTES,
    LONGEST_REST_S,
    LONGEST_TRAVEL_S,
    MEASURED,
    MEASURED_LONG,
    REST_S,
    LinkUse,
    PerAnswer,
    decide,
)

MODEL = 10_000_000


def seen(computed_s: float, waited_s: float, form: Form = "float32", answers: int = MEASURED_LONG) -> PerAnswer:
    return PerAnswer(form, answers, computed_s, waited_s, 10e6, 10e6)


@pytest.mark.parametrize(
    ("computed_s", "waited_s", "form", "coarsest", "expected"),
    [
        (1.0, 0.4, "float32", "int8", None),  # adds 71 %
        (1.0, 0.5, "float32", "int8", "bfloat16"),  # 67 %; with half of the wait 80 %
        (1.0, 1.5, "float32", "int8", "int8"),  # 40 %; with half 57 %, with a quarter 72 %
        (1.0, 9.0, "float32", "int8", "int8"),  # would not be enough by what is known, and is tried
        (1.0, 9.0, "float32", "bfloat16", "bfloat16"),
        (1.0, 0.5, "bfloat16", "int8", "int8"),
        (1.0, 0.5, "float32", "float32", "waits"),
        (1.0, 0.5, "bfloat16", "bfloat16", "waits"),
        (1.0, 0.5, "int8", "int8", "waits"),
    ],
)
def test_of_a_thin_link_the_finest_form_that_is_enough_is_tried_then_it_waits(
    computed_s: float, waited_s: float, form: Form, coarsest: Form, expected: str | None
) -> None:
    found = decide(seen(computed_s, waited_s, form), coarsest, MODEL)
    assert (None if found is None else found.form or "waits") == expected


def test_the_reason_has_the_figures_and_what_to_try() -> None:
    found = decide(seen(1.0, 1.5), "float32", MODEL)
    assert found is not None
    assert found.why == (
        "an answer takes its link 1.5 s beside 1 s of computing (10.0 MB to it and 10.0 MB from it as float32), so it "
        'adds 40 % of its power, and at least 70 % are wanted. Setting thin_links = "int8" might make that 72 %'
    )
    last = decide(seen(1.0, 1.5, "int8"), "int8", MODEL)
    assert last is not None
    assert "thin_links" not in last.why


def test_nobody_is_judged_by_one_answer_or_by_small_messages() -> None:
    assert decide(seen(1.0, 9.0, answers=MEASURED - 1), "int8", MODEL) is None
    assert decide(seen(1.0, 9.0), "int8", JUDGED_BYTES - 1) is None
    assert decide(seen(1.0, 9.0, answers=MEASURED), "int8", MODEL) is not None
    assert decide(seen(1.0, 9.0, "int8", MEASURED_LONG - 1), "int8", MODEL) is None
    assert decide(PerAnswer(), "int8", MODEL) is None


def test_the_wait_is_what_was_not_computed_while_it_had_a_task() -> None:
    """1. Two tasks at once: the second's time begins when the first was answered. 2. Nothing to do is no wait. 3. Who
    says to have computed longer than it had the task has not waited, and no number is none."""
    use = LinkUse(0)
    use.sent(1, 100, "float32", 10.0, all_weights=True)
    use.sent(2, 10, "float32", 10.0, all_weights=False)
    use.arrived(1, 50, 1.0, 13.0)
    assert (use.seen.computed_s, use.seen.waited_s) == (1.0, 2.0)
    use.arrived(2, 50, 1.0, 14.0)
    assert use.seen.answers == 2
    assert use.seen.waited_s == 1.0
    use.sent(3, 10, "float32", 100.0, all_weights=False)
    use.arrived(3, 50, 77.0, 101.0)
    assert use.seen.waited_s == pytest.approx(2 / 3)
    use.sent(4, 10, "float32", 102.0, all_weights=False)
    use.arrived(4, 50, math.nan, 103.0)
    use.arrived(99, 50, 1.0, 104.0)
    assert use.seen.answers == 3
    assert (use.to_bytes, use.from_bytes) == (130, 250)


def test_what_begins_a_form_and_what_came_in_another_is_not_measured() -> None:
    use = LinkUse(0)
    use.sent(1, 10, "float32", 0.0, all_weights=True)
    use.take_form("int8")
    assert use.arrived(1, 10, 0.5, 1.0) == "float32"
    use.sent(2, 10, "int8", 1.0, all_weights=True)
    assert use.arrived(2, 10, 0.5, 9.0) == "int8"
    assert use.seen.answers == 0
    use.sent(3, 10, "int8", 9.0, all_weights=True)  # it missed too many steps: that is its link's, too
    use.arrived(3, 10, 0.5, 10.0)
    assert use.seen == PerAnswer("int8", 1, 0.5, 0.5, 10, 10)


def test_rests_grow_and_end() -> None:
    use = LinkUse(0)
    use.take_form("int8")
    assert [use.rest(7.0) for _ in range(6)] == [REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S, *[LONGEST_REST_S] * 2]
    assert use.rests_until_s == 7.0 + LONGEST_REST_S
    assert use.seen == PerAnswer("int8")


def test_an_answer_is_waited_for_as_long_as_a_thin_link_takes_and_then_as_long_as_this_one() -> None:
    assert LinkUse(0).travel_s(1_000_000) == 20.0
    assert LinkUse(0).travel_s(10**9) == LONGEST_TRAVEL_S
    assert LinkUse(0).travel_s(JUDGED_BYTES - 1) == 0.0
    assert LinkUse(0, seen(1.0, 3.0)).travel_s(10**9) == 6.0
