"""What a run over thin links counts of itself."""

from __future__ import annotations

import pytest

from atoll.strategies.stale_sparse.tally import Tally


def test_what_is_told_of_each_step_adds_up_to_what_is_told_of_the_run() -> None:
    tally = Tally(["a.weight", "a.bias", "b.weight"])
    tally.looked(["a.weight", "a.bias"], fresh=2, waited_s=0.2)
    tally.looked(["b.weight"], fresh=0, waited_s=0.3)
    tally.waited_for_all(0.5)
    assert tally.take_waited() == pytest.approx(1.0)
    assert tally.take_waited() == 0
    first = tally.take_step(sparsity=0.9, sent_bytes=100)
    assert first.metrics == pytest.approx({"sparsity": 0.9, "stall_s": 1.0, "fresh_share": 2 / 3, "sent_bytes": 100})
    second = tally.take_step(sparsity=0.9, sent_bytes=130)
    assert second.metrics == {"sparsity": 0.9, "stall_s": 0, "fresh_share": 0, "sent_bytes": 30}
    tally.looked(["b.weight"], fresh=1, waited_s=0.1)  # of a step under way
    tally.add({"tasks": 3})
    tally.add({"tasks": 4})
    assert tally.statistics() == pytest.approx(
        {"tasks": 7, "fresh_share": 3 / 4, "stall_s.a.weight": 0.1, "stall_s.a.bias": 0.1, "stall_s.b.weight": 0.4}
    )
