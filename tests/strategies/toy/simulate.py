from __future__ import annotations

from atoll.strategies.dense.simulate import DenseSteps


class ToySteps(DenseSteps):
    """As `dense`: a toy takes no time."""
