"""The vector that is averaged, and Adam's second moments of a group."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from atoll.strategies.groups.averaging import alike, distance, shares_of, weighted_mean
from atoll.strategies.groups.replica_state import MEAN, REMOVED, ReplicaState


def replicas(count: int, adam: bool) -> list[tuple[nn.Module, torch.optim.Optimizer, ReplicaState]]:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made = []
    for _ in range(count):
        model = copy.deepcopy(first)
        optimizer: torch.optim.Optimizer
        if adam:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        made.append((model, optimizer, ReplicaState(model, optimizer)))
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("adam", [False, True])
def test_a_state_goes_into_another_replica_bit_for_bit(adam: bool) -> None:
    (model, optimizer, state), (other, other_optimizer, other_state) = replicas(2, adam)
    for seed in range(3):
        train(model, optimizer, seed)
    other_state.write(state.read(), 1.0)
    assert np.array_equal(other_state.read(), state.read())
    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, its)
    train(model, optimizer, 9)
    train(other, other_optimizer, 9)
    assert np.array_equal(other_state.read(), state.read())  # moments and steps went along


def test_the_average_of_all_is_the_mean_bit_for_bit() -> None:
    """Of states in slices, as members average them, against the whole vectors' mean."""
    states = [np.random.default_rng(seed).normal(size=1001).astype(np.float32) for seed in range(3)]
    weights = [8.0, 8.0, 16.0]
    whole = weighted_mean(states, weights)
    for cut in (1, 333, 1000):
        sliced = [weighted_mean([one[part] for one in states], weights) for part in (slice(cut), slice(cut, None))]
        assert np.array_equal(np.concatenate(sliced), whole)
    np.testing.assert_allclose(whole, np.average(states, axis=0, weights=weights), rtol=1e-5, atol=1e-6)
    assert np.array_equal(weighted_mean([states[0]], [4.0]), states[0])


def test_weights_of_zero_count_alike_and_unequal_ones_as_fewer_replicas() -> None:
    assert shares_of([0.0, 0.0]) == [0.5, 0.5]
    assert alike([4.0, 4.0, 4.0]) == pytest.approx(3)
    assert alike([1.0, 0.0]) == 1
    assert 1 < alike([3.0, 1.0]) < 2


def test_the_distance_from_the_mean_is_of_its_norm_and_never_more_than_all_of_it() -> None:
    mean = np.array([3.0, 4.0], np.float32)
    assert distance(mean, mean) == 0
    assert distance(np.array([3.0, 5.0], np.float32), mean) == pytest.approx(0.2)
    assert distance(-mean, mean) == 1
    assert (distance(mean, 0 * mean), distance(0 * mean, 0 * mean)) == (1, 0)


def test_going_back_to_a_rounds_beginning_restores_every_bit() -> None:
    ((model, optimizer, state),) = replicas(1, adam=True)
    train(model, optimizer, 0)
    state.write(state.read(), 4.0)
    kept, before = state.copy(), copy.deepcopy(optimizer.state_dict())
    for seed in range(1, 4):
        train(model, optimizer, seed)
    state.restore(kept)
    for number, entry in optimizer.state_dict()["state"].items():
        for name, one in entry.items():
            assert torch.equal(one, before["state"][number][name]), name


def test_second_moments_of_a_group_have_the_variance_of_its_mean_gradient() -> None:
    """1. Four replicas see gradients of mean 1 and standard deviation 2, and average after each update. 2. Their v is
    that of one that sees the mean of the four: 1 + 4 / 4. Averaged as they are it would stay 1 + 4; and with a fourth
    of the variance left of what the average before had left, it would go to 1."""
    beta_2, count = 0.9, 4
    generator = torch.Generator().manual_seed(5)
    parameters = [nn.Parameter(torch.zeros(20_000)) for _ in range(count)]
    made = []
    for parameter in parameters:
        model = nn.Module()
        model.weight = parameter
        optimizer = torch.optim.Adam([parameter], lr=0.0, betas=(0.9, beta_2))
        made.append((optimizer, ReplicaState(model, optimizer)))
    for _ in range(120):
        for parameter, (optimizer, _) in zip(parameters, made, strict=True):
            parameter.grad = 1 + 2 * torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        mean = weighted_mean([state.read() for _, state in made], [1.0] * count)
        for _, state in made:
            state.write(mean, float(count))
    kept = made[0][0].state[parameters[0]]
    assert (kept["exp_avg_sq"] >= 0).all()
    # The running mean itself varies: of E[s^2] = 1 + its variance, as with a batch of all.
    assert kept["exp_avg_sq"].mean().item() == pytest.approx(2.0, rel=0.05)
    assert (kept["exp_avg_sq"] + kept[REMOVED]).mean().item() == pytest.approx(5.0, rel=0.02)
    assert kept[MEAN].mean().item() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("count", [4, 16])
def test_updates_of_a_group_are_as_large_as_adams_on_the_mean_gradient_from_the_first_on(count: int) -> None:
    """1. Replicas average after each update, at Adam's own beta_2, whose moments are far from settled for hundreds of
    updates; half of their gradients are alike, the others deviate. 2. After the first average v is that of plain Adam
    on the mean gradient. 3. Updates 10, 50 and 300 are as large as plain Adam's. 4. v is never below the squared mean
    gradient."""
    deviation = torch.tensor([0.0, 0.5]).repeat(32)
    generator = torch.Generator().manual_seed(5)
    alone, *parameters = [nn.Parameter(torch.zeros(64)) for _ in range(count + 1)]
    plain = torch.optim.Adam([alone])
    made = []
    for parameter in parameters:
        model = nn.Module()
        model.weight = parameter
        optimizer = torch.optim.Adam([parameter])
        made.append((optimizer, ReplicaState(model, optimizer)))
    kept, expected = made[0][0].state[parameters[0]], plain.state[alone]
    for update in range(1, 301):
        gradients = [1 + deviation * torch.randn(64, generator=generator) for _ in range(count)]
        before, alone_before = parameters[0].detach().clone(), alone.detach().clone()
        for parameter, gradient, (optimizer, _) in zip(parameters, gradients, made, strict=True):
            parameter.grad = gradient
            optimizer.step()
        alone.grad = torch.stack(gradients).mean(dim=0)
        plain.step()
        mean = weighted_mean([state.read() for _, state in made], [1.0] * count)
        for _, state in made:
            state.write(mean, float(count))
        assert (kept["exp_avg_sq"] >= 0.999 * kept[MEAN].square() / (1 - 0.999**update)).all()
        if update == 1:
            torch.testing.assert_close(kept["exp_avg_sq"], expected["exp_avg_sq"], rtol=1e-4, atol=0)
        if update in {10, 50, 300}:
            size, its = parameters[0].detach() - before, alone.detach() - alone_before
            assert (size[::2].norm() / its[::2].norm()).item() == pytest.approx(1, abs=0.001), update
            assert (size[1::2].norm() / its[1::2].norm()).item() == pytest.approx(1, abs=0.05), update


def test_weight_decay_in_the_gradient_is_no_variance_and_an_unused_parameter_keeps_its_own_bias() -> None:
    """1. Two replicas see the same gradients; Adam adds weight decay to them, so v has it and the gradients' mean has
    to. 2. One of two parameters is used from the fourth update on. 3. Averages change nothing: each replica trains as
    plain Adam does."""
    # So small a rate that the decay hardly changes: a gradient that changes in time has a variance, too.
    made, weights = [], [torch.linspace(-2, 2, 8), torch.ones(8)]
    for _ in range(3):
        model = nn.Module()
        model.first, model.second = (nn.Parameter(one.clone()) for one in weights)
        optimizer = torch.optim.Adam(
            [{"params": [model.first]}, {"params": [model.second], "betas": (0.5, 0.9)}], lr=1e-3, weight_decay=0.3
        )
        made.append((model, optimizer))
    states = [ReplicaState(*one) for one in made[1:]]
    for update in range(8):
        for model, optimizer in made:
            model.first.grad = torch.linspace(0.1, 1, 8)
            model.second.grad = torch.full((8,), 0.5) if update >= 3 else None
            optimizer.step()
        mean = weighted_mean([state.read() for state in states], [1.0, 1.0])
        for state in states:
            state.write(mean, 2.0)
    for name, start in zip(("first", "second"), weights, strict=True):
        expected, moved = (getattr(model, name).detach() - start for model, _ in made[:2])
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)
