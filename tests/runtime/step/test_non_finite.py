"""Steps in which a loss or gradient was not finite are counted, and reported ever more seldom."""

from __future__ import annotations

from typing import Any, cast

import torch

from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.measures.non_finite import NonFinite


class Rank2:
    def __init__(self) -> None:
        self.place, self.said = self, list[str]()
        self.rank = 2

    def notice(self, level: Any, text: str) -> None:
        self.said.append(text)


def test_each_step_counts_once_and_events_become_rare() -> None:
    session = Rank2()
    watch = NonFinite(cast(Session, session))
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (3, 100, 2, 50, 7)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for step in range(9):
        for one in weights:
            one.grad = torch.ones_like(one)
        if step > 0:
            watch.loss(torch.tensor(torch.nan if step == 1 else torch.inf))
            cast(torch.Tensor, weights[4].grad)[3] = -torch.inf
        else:
            watch.loss(torch.tensor(1.0))
            cast(torch.Tensor, weights[1].grad)[3] = torch.nan  # the largest is not looked at
        watch.gradients(optimizer)
        watch.gradients(optimizer)
        assert watch.end_step(step) == step
    assert [text.partition(":")[0] for text in session.said] == [f"rank 2, step {step}" for step in (1, 2, 4, 8)]
    assert session.said[0] == "rank 2, step 1: its loss was not finite; a gradient was not finite"
    assert session.said[3].endswith("(8 such steps on this worker so far)")
