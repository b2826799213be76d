from __future__ import annotations

import torch
from torch import nn

from atoll.strategies.compressed.flat_state import FlatState
from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup, Way

CPU = torch.device("cpu")


def test_a_residual_that_was_sent_does_not_come_back_after_a_muted_pass() -> None:
    """1. A pass leaves something out of a tensor. 2. A plan ends its compression: a muted pass, which counts for
    nothing, takes the residual, and so does the pass after it. 3. From then on nothing is left."""
    layout = TensorLayout.of(["w"], [nn.Parameter(torch.zeros(3))])
    state, group = FlatState(layout, CPU), TensorGroup(0, 1, Way())
    state.open()
    state.begin(group).fill_(2.0)
    for counts, expected in ((True, [2.0] * 3), (False, [2.0] * 3), (True, None), (True, None), (True, None)):
        state.complete = counts  # of the pass before
        state.open()
        drained = state.drain(group)
        assert (None if drained is None else drained.tolist()) == expected
    state.complete = True
    assert state.by_name()["w"].tolist() == [0.0] * 3


def test_a_tensor_that_no_rank_used_keeps_what_was_left_out() -> None:
    layout = TensorLayout.of(["a", "b"], [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))])
    state, group = FlatState(layout, CPU), TensorGroup(0, 2, Way())
    state.open()
    state.begin(group).fill_(2.0)
    for _ in range(3):
        state.complete = True
        state.open()
        state.drain(group)
        state.put_back(1)
    state.complete = True
    assert {name: one.tolist() for name, one in state.by_name().items()} == {"a": [0.0, 0.0], "b": [2.0, 2.0]}
