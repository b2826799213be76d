from __future__ import annotations

import random

import torch
from torch import nn

from atoll.strategies.compressed.flat_state import FlatState
from atoll.strategies.compressed.groups.layout import TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup, Way

CPU = torch.device("cpu")
NAMES = ["a", "b", "c", "d", "e"]
GROUPS = [TensorGroup(0, 2, Way(compressed=True)), TensorGroup(2, 3, Way(compressed=True)), TensorGroup(3, 5, Way())]


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


def test_whatever_passes_come_what_counts_is_there_once() -> None:
    """Against a dict of what each tensor has, over random passes, of which some do not count."""
    generator = random.Random(3)
    for _ in range(60):
        state = FlatState(TensorLayout.of(NAMES, [torch.zeros(2, 3) for _ in NAMES]), CPU)
        expected = {name: torch.full((6,), float(index)) for index, name in enumerate(NAMES)}
        state.take_over(expected)
        for _ in range(12):
            state.open()
            counts, passed = generator.random() < 0.6, {name: one.clone() for name, one in expected.items()}
            for group in GROUPS:
                names = NAMES[group.begin : group.end]
                before = torch.cat([expected[name] for name in names])
                match generator.choice(["compress", "drain", "drain", "leave"]):
                    case "compress":
                        part = state.begin(group)
                        assert torch.equal(part, before)
                        part.add_(generator.randint(1, 9))
                        passed.update(zip(names, part.clone().split(6), strict=True))
                        if generator.random() < 0.3:
                            state.put_back(group.begin)
                            passed[names[0]] = expected[names[0]]
                    case "drain":
                        drained = state.drain(group)
                        assert torch.equal(before, torch.zeros_like(before) if drained is None else drained)
                        passed.update({name: torch.zeros(6) for name in names})
            state.complete = counts
            expected = passed if counts else expected
            assert all(torch.equal(one, expected[name]) for name, one in state.by_name().items())
