from __future__ import annotations

import pytest
from zmq_agent import Start, torchrun_like

pytestmark = pytest.mark.timeout(300)


def test_unequal_parts_give_the_gradient_of_the_whole_batch_for_awkward_models(start: Start) -> None:
    """Two processes against one: tied, frozen, unused and now-and-then-used parameters, two dtypes, accumulation, both
    ways to zero gradients, many buckets; then the agreement beside them. The script checks, each rank for itself."""
    assert torchrun_like("dense_cases.py", start=start) == [0, 0]
