"""Weights that volunteers have: the same for all, and near to the rank's."""

from __future__ import annotations

import pytest
import torch

from atoll.agent.runtime.rounding import SMALL, Form
from atoll.strategies.volunteer.weights_line import WeightsLine, applied


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_clients_have_the_same_weights_whichever_steps_they_missed(form: Form) -> None:
    """1. One client takes part in each step, another in every third, a third one comes late. 2. What they have is the
    same bits, and nearer to the server's than a tenth of what one step changed: roundings do not add up."""
    draw = torch.Generator().manual_seed(1)
    line, weights = WeightsLine(form), torch.randn(5 * SMALL, generator=draw)
    has: dict[str, tuple[int, torch.Tensor]] = {}
    whole: list[tuple[str, int]] = []
    for version in range(13):
        weights = weights + 1e-3 * torch.randn(len(weights), generator=draw)
        for name, every in (("always", 1), ("seldom", 3), ("late", 12)):
            if version % every or (name == "late" and not version):
                continue
            known = has.get(name)
            tensors, changes = line.to(known[0] if known else -1, version, lambda now=weights: now)  # type: ignore[misc]
            if changes:
                assert known is not None
                applied(known[1], tensors, form, changes)
                has[name] = (version, known[1])
            else:
                has[name] = (version, tensors[0])
                whole.append((name, version))
        assert float((has["always"][1] - weights).norm()) <= 0.1 * 1e-3 * len(weights) ** 0.5
    assert torch.equal(has["always"][1], has["seldom"][1])
    assert torch.equal(has["always"][1], has["late"][1])
    assert [version for name, version in whole if name == "always"] == [0]
    assert [version for name, version in whole if name == "seldom"] == ([0] if form == "int8" else [0, 3, 6, 9, 12])


def test_a_client_that_has_the_weights_as_float32_gets_the_very_ones() -> None:
    weights = torch.randn(SMALL)
    tensors, changes = WeightsLine("float32").to(3, 4, lambda: weights)
    assert (tensors[0] is weights, changes) == (True, 0)
