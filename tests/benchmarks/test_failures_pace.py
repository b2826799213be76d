from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.failures import Pace, Restorable, Stretch, Writing


def step_by_step(pace: Pace, start_s: float, start_step: int, end_s: float) -> Stretch:
    """Every step on its own, and every checkpoint it begins."""
    now_s, step = start_s, start_step
    in_memory = stored = None
    while now_s + pace.step_s <= end_s:
        now_s, step = now_s + pace.step_s, step + 1
        if pace.memory and step % pace.memory.every == 0 and now_s + pace.memory.write_s <= end_s:
            in_memory = Restorable(step, now_s)
        if step % pace.persistent.every == 0:
            if now_s + pace.persistent.pause_s + pace.persistent.write_s <= end_s:
                stored = Restorable(step, now_s)
            now_s += pace.persistent.pause_s
    return Stretch(step, in_memory, stored)


@given(
    start_step=st.integers(0, 30),
    quarters=st.integers(0, 800),
    memory=st.none() | st.tuples(st.integers(1, 4), st.integers(0, 16)),
    persistent=st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(0, 40)),
)
def test_a_stretch_is_what_going_step_by_step_gives(
    start_step: int, quarters: int, memory: tuple[int, int] | None, persistent: tuple[int, int, int]
) -> None:
    """In quarters of a second, which add up without rounding."""
    in_memory = None if memory is None else Writing.at_most_every(memory[0], 0.0, memory[1] / 4, 1.0)
    stored = Writing.at_most_every(persistent[0], persistent[1] / 4, persistent[2] / 4, 1.0)
    pace = Pace(1.0, in_memory, stored)
    end_s = 10.0 + quarters / 4
    assert pace.train(10.0, start_step, end_s) == step_by_step(pace, 10.0, start_step, end_s)


@pytest.mark.parametrize(("write_s", "every"), [(0.0, 1), (0.3, 1), (0.30001, 2), (2.7, 9)])
def test_a_checkpoint_is_complete_before_the_next_begins(write_s: float, every: int) -> None:
    assert Writing.at_most_every(1, 0.0, write_s, 0.3).every == every
