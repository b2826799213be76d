"""What benchmarks/groups.py makes of curves: rates without the first round, a target that all rules reach, goals."""

from __future__ import annotations

from grouping.standing import Spread, Standing, Trained


def trained(rule: str, seed: int, every_s: float, losses: tuple[float, ...]) -> Trained:
    return Trained("slower", rule, seed, 0.2, tuple((3 + every_s * at, loss) for at, loss in enumerate(losses)))


def test_the_table_holds_each_rule_against_the_all_reduce_of_its_seed() -> None:
    """Of two seeds; the scheduler has rounds twice and three times as often. Its last loss is the higher one of the
    first seed, so that is what both have to reach; of the second all-reduce's is."""
    standing = Standing(
        [
            trained("all", 1, 6.0, (2.0, 1.5, 1.0)),
            trained("scheduled", 1, 3.0, (2.0, 1.6, 1.5)),
            trained("all", 2, 6.0, (2.0, 1.4, 1.2)),
            trained("scheduled", 2, 2.0, (2.0, 1.2, 1.1)),
            trained("scheduled", 3, 1.0, (2.0, 1.2, 1.1)),  # nothing to hold it against
        ]
    )
    assert [row.split(" | ")[:3] for row in standing.table()[2:]] == [
        ["| `all`", "0.167", "1.00"],
        ["| `scheduled`", "0.417 [0.333 to 0.500]", "2.50 [2.00 to 3.00]"],
    ]
    assert standing.goals() == [
        "2.50 [2.00 to 3.00] times the rounds a second of `all`, goal 2.5",
        "the same held-out loss 2.00 [1.00 to 3.00] times sooner than `all`, goal 1.5",
        "last loss 1.300 [1.100 to 1.500], of `all` 1.100 [1.000 to 1.200]",
    ]
    assert f"{Spread.of([1.0]):.1f}" == "1.0"
