from __future__ import annotations

from atoll.controller.jobs.wire import plan_to_wire
from atoll.controller.state.records import PlanRecord
from atoll.v1.common_pb2 import Plan

EARLIER = PlanRecord(run=2, id=3, from_step=7, shares=(2.0, 1.0), planner="even", reason="r", input="{}", output="{}")


def test_all_that_a_worker_needs_of_a_plan_is_sent() -> None:
    record = PlanRecord(
        run=2,
        id=3,
        from_step=7,
        shares=(2.0, 1.0),
        planner="goodput",
        reason="learns faster",
        input="{}",
        output="{}",
        measured_s=0.5,
        rate=0.9,
        total_batch=96,
        learning_rate_factor=1.5,
        predicted_s=0.25,
    )
    assert plan_to_wire(record) == Plan(
        run=2,
        id=3,
        from_step=7,
        shares=[2.0, 1.0],
        planner="goodput",
        reason="learns faster",
        rate=0.9,
        total_batch=96,
        learning_rate_factor=1.5,
        predicted_step_s=0.25,
    )


def test_a_plan_that_says_nothing_of_batch_and_rates_leaves_them_to_the_script() -> None:
    wire = plan_to_wire(EARLIER)
    assert (wire.total_batch, wire.learning_rate_factor, wire.HasField("rate")) == (0, 0.0, False)
