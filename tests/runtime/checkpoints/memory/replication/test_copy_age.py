from __future__ import annotations

from atoll.agent.runtime.checkpoints.memory.replication.link_share import MIN_MEASURED_S, SETTLING_S, CopyAge

TOTAL_BYTES = 350_000_000


def told(bytes_per_s: float, age: CopyAge) -> list[str]:
    """By copies of one generation at this rate, after two minutes in which hardly anything arrived."""
    age.begin(1000.0)
    said = []
    for second in range(1, 300):
        arrived = int(max(0.0, second + 1 - SETTLING_S) * bytes_per_s) + second
        said.append((second, age.observe(arrived, TOTAL_BYTES, 0.15, 1000.0 + second)))
    return [text for second, text in said if text is not None and second >= SETTLING_S + MIN_MEASURED_S - 1]


def test_how_old_copies_become_is_told_once_as_soon_as_it_can_be_known() -> None:
    age = CopyAge()
    (text,) = told(187_500, age)
    assert "about 31 min each: 350.0 MB" in text
    assert "copies have 15 %" in text
    assert "up to 62 min old" in text
    assert told(100_000, age) == []


def test_copies_that_are_there_soon_are_not_worth_a_word() -> None:
    assert told(2_000_000, CopyAge()) == []


def test_a_holder_that_takes_nothing_tells_nothing_of_the_link() -> None:
    age = CopyAge()
    age.begin(1000.0)
    assert [age.observe(0, TOTAL_BYTES, 0.15, 1000.0 + second) for second in range(600)] == [None] * 600
