from __future__ import annotations

from lab.compression_bound import bound_s

from atoll.controller.planners.tensor_compression.compression import CompressionInput, Option, TaskCost, TensorTimes
from atoll.controller.planners.tensor_compression.tensor_groups import plan_grouping


def task(on: str, alpha: float, beta: float = 0.0, factor: float = 1.0) -> TaskCost:
    return TaskCost(on=on, alpha=alpha, beta=beta, factor=factor)


def test_the_bound_is_that_with_compression_for_free() -> None:
    """All that is left is the backward pass and what the packed tensor takes on the link."""
    none = Option(name="none", tasks=(task("link", 0.0, 1.0),))
    packed = Option(name="packed", tasks=(task("cpu", 100.0), task("link", 0.0, 1.0, 0.1), task("cpu", 100.0)))
    given = CompressionInput(forward_s=0.5, tensors=(TensorTimes(bytes=20, backward_s=1),), options=(none, packed))
    plan = plan_grouping(given)
    assert (plan.options, plan.iteration_time, bound_s(given, plan)) == (("none",), 21.5, 3.5)
