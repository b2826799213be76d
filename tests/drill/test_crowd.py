from __future__ import annotations

from atoll.v1 import jobs_pb2
from drill.crowd import CrowdLeft, not_kept
from drill.invariants import crowds_kept


def test_a_controller_that_forgets_who_left_or_takes_it_for_long_silent_is_found_out() -> None:
    """Of more than 256 streams that ended at once, those that it forgot counted as silent since it began to lead."""
    there = {name: jobs_pb2.Node(name=name, seen_s_ago=ago) for name, ago in (("a", 0.1), ("b", 2.7), ("c", 610.0))}
    wrong = not_kept({**there, "d": None}, lease_s=2.8)
    assert wrong == ["d is forgotten", "c counts as silent for 610.0 s"]
    assert crowds_kept([CrowdLeft(0.0, ())]).holds
    assert not crowds_kept([CrowdLeft(0.0, ()), CrowdLeft(1.0, tuple(wrong))]).holds
