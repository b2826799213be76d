"""What the race counts, and that its methods are what their papers say: on a model of a few numbers, without data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from racing.advice import asked
from racing.clock import Exchange, Network, finished_s, link_of
from racing.codecs import BLOCK, Blocks, payload_bytes, rounded, top_blocks
from racing.course import Lap
from racing.inner import Replica, gather, ring
from racing.local import CHUNK, DiLoCo, SparseLoCo, largest_of_chunks
from racing.synchronous import Ddp, PowerSgd
from racing.updates import OwnedUpdates, Updates

from atoll.strategies.shared_params.local_fit_gap import EVERY, NEEDED
from atoll.strategies.shared_params.second_moments import RATIO

ENTRIES = 64
FREE = Network(up_bps=1e30, down_bps=1e30)


class Bowl:
    """A task of one quadratic: the gradient of replica i at theta is theta - goal_i."""

    entries = ENTRIES
    shapes: Sequence[tuple[int, ...]] = ((8, 4), (32,))
    initial = torch.linspace(-1, 1, ENTRIES)

    def gradient(self, theta: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.loss = float((theta - inputs).square().sum() / 2)
        return theta - inputs

    def blocks(self) -> Sequence[slice]:
        return [slice(0, 32), slice(32, ENTRIES)]

    def tensors(self, theta: torch.Tensor) -> list[torch.Tensor]:
        return [theta[at].view(shape) for at, shape in zip(self.blocks(), self.shapes, strict=True)]


def goal(island: int) -> torch.Tensor:
    return torch.randn(ENTRIES, generator=torch.Generator().manual_seed(island))


def replicas(count: int, rows: Sequence[int] = (1,) * 4) -> list[Replica]:
    task: Any = Bowl()
    batches: list[Any] = [SimpleNamespace(at=partial(both, goal(i)), rows=rows[i]) for i in range(count)]
    return [Replica(task, one, peak=1e-2, steps=100) for one in batches]


def both(goal_N: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return goal_N, goal_N


@pytest.mark.parametrize(("due", "done_s"), [(1, [13.0, 14.0, 15.0]), (2, [1.0, 13.0, 14.0])])
def test_a_step_waits_for_what_is_due_before_it(due: int, done_s: list[float]) -> None:
    """1. After the first step 12 bytes leave over a link of 8 bit/s: 12 s. 2. Needed at once, the first step's model is
    there at 13 s. 3. Needed one step later, the second step is trained meanwhile, and the third begins at 13 s."""
    exchange = Exchange(after=0, due=due, up_bytes=12, down_bytes=3)
    assert finished_s([exchange], 3, [1.0], Network(up_bps=8, down_bps=8)) == done_s


def test_the_slowest_island_and_the_latency_of_every_hop_count() -> None:
    network = Network(up_bps=8e6, down_bps=8e6, latency_s=0.05)
    done = finished_s([ring(1e6, 4, after=0, due=1)], 2, [0.5, 2.0], network)
    assert done[0] == pytest.approx(2.0 + 1.5 + 6 * 0.05)
    assert done[1] == pytest.approx(done[0] + 2.0)


def test_a_link_of_rho_carries_a_dense_ring_in_rho_steps() -> None:
    network = link_of(40, entries=1000, islands=4, step_s=0.5)
    assert network.takes_s(ring(4000, 4, after=0, due=1)) == pytest.approx(20.0)
    assert gather(10, 4, after=0, due=1).up_bytes == 30


@pytest.mark.parametrize("bits", [2, 4, 16, 32])
def test_a_codec_keeps_signs_and_loses_little(bits: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    seen = rounded(values, bits)
    assert seen.shape == values.shape
    assert (seen * values >= 0).all()
    assert (seen - values).norm() <= {2: 0.5, 4: 0.13, 16: 1e-3, 32: 0.0}[bits] * values.norm()
    assert torch.equal(rounded(torch.zeros(5), bits), torch.zeros(5))


def test_the_heaviest_blocks_are_chosen_whole() -> None:
    values = torch.zeros(3 * BLOCK + 5)
    values[BLOCK] = 1.0
    values[-1] = 2.0
    mask = top_blocks(values, 0.5)
    assert mask.nonzero().squeeze(1).tolist() == [*range(BLOCK, 2 * BLOCK), *range(3 * BLOCK, 3 * BLOCK + 5)]
    assert payload_bytes(32, 16, indexed=True) == 66


def test_all_updates_in_float32_are_local_sgd_of_every_step() -> None:
    """With everything sent at once the shared parameters are the mean of the islands' own steps, as averaging in each
    step is."""
    ours, averaging = replicas(3), replicas(3)
    updates = Updates(ours, density=1.0, bits=32, late=0)
    local = DiLoCo(averaging, every=1, outer_learning_rate=1.0, momentum=0.0)
    for step in range(5):
        updates.step(step)
        local.step(step)
        updates._apply(*updates._in_flight.pop(step + 1))
        assert torch.allclose(updates.consolidated(), local.consolidated(), atol=1e-6)
        assert all(torch.allclose(one.theta, updates.consolidated(), atol=1e-6) for one in ours)


def test_aggregators_that_send_all_back_are_updates_from_everybody_to_everybody() -> None:
    through, direct = replicas(3), replicas(3)
    owned = OwnedUpdates(through, density=0.5, back=1.0, bits=32, whole_batch=False)
    updates = Updates(direct, density=0.5, bits=32, whole_batch=False)
    for step in range(8):
        sent = owned.step(step)
        updates.step(step)
        assert torch.allclose(owned.consolidated(), updates.consolidated(), atol=1e-6)
    assert [one.up_bytes for one in sent] == [pytest.approx(2 / 3 * (32 * 4 + 2 + ENTRIES * 4))]


@pytest.mark.parametrize("make", [Updates, partial(OwnedUpdates, back=0.3)])
def test_what_was_not_sent_waits_and_arrives_in_the_end(make: Any) -> None:
    """1. Ten steps with a quarter of the blocks each. 2. Nobody moves any more; exchanges go on. 3. Everybody's live
    weights are the shared parameters, and these are the mean of all that the islands moved by."""
    ones = replicas(2)
    updates = make(ones, density=0.25, bits=32, late=1)
    moved = [torch.zeros(ENTRIES), torch.zeros(ENTRIES)]
    for step in range(60):
        for replica, total in zip(ones, moved, strict=True):
            if step < 10:
                inner = replica.update

                def counted(
                    gradient: Any, step: int, inner: Any = inner, one: Replica = replica, total: Any = total
                ) -> None:
                    before = one.theta.clone()
                    inner(gradient, step)
                    total += one.theta - before

                replica.update = counted  # type: ignore[method-assign]
            else:
                replica.update = lambda gradient, step: None  # type: ignore[method-assign]
        updates.step(step)
        for replica in ones:
            del replica.update
    wanted = Bowl.initial + (moved[0] + moved[1]) / 2
    assert torch.allclose(updates.consolidated(), wanted, atol=1e-5)
    assert all(torch.allclose(one.theta, wanted, atol=1e-5) for one in ones)


@pytest.mark.parametrize(("lowest", "at_shared_params"), [((0.2, 0.2), False), ((-0.02, 0.02), True)])
def test_gradients_move_to_the_shared_params_where_own_weights_are_good_for_own_data_alone(
    lowest: tuple[float, float], at_shared_params: bool
) -> None:
    """Two islands on the way to the same lowest point, or each near one of its own."""
    task: Any = Bowl()
    goals = [Bowl.initial + away for away in lowest]
    batches: list[Any] = [SimpleNamespace(at=partial(both, one), rows=1) for one in goals]
    ones = [Replica(task, one, peak=1e-2, steps=200) for one in batches]
    updates = OwnedUpdates(ones, density=0.25, back=0.5, bits=32, follows=True)
    for step in range(EVERY * NEEDED):
        updates.step(step)
    assert updates._at_shared_params == at_shared_params


def test_what_islands_tell_of_second_moments_is_an_exchange_of_a_few_steps() -> None:
    """1. After eight updates everybody tells a mean for each two rows of four, and one of what has no rows, in pieces.
    2. They are there eight updates later, and from then on each divides by what one Adam of the whole batch would."""
    ones = replicas(2)
    updates = Updates(ones, density=1.0, bits=32)
    exchanges = [updates.step(step)[1:] for step in range(20)]
    assert {step: [(one.due, one.up_bytes) for one in told] for step, told in enumerate(exchanges) if told} == {
        7: [(16, 4.0)] * 5, 15: [(24, 4.0)] * 5,
    }  # fmt: skip
    ratios = [one._adam.state[parameter][RATIO] for one in ones for parameter in one._parameters]
    assert len(ratios) == 4
    assert torch.cat(ratios).median() < 1


def test_who_is_away_neither_trains_nor_counts() -> None:
    """1. One of three is gone for ten steps and comes back. 2. Its live weights lack nothing of the others' work."""
    ones, two = replicas(3), replicas(2)
    ones[2].away = True
    updates, without = (Updates(some, density=1.0, bits=32, whole_batch=False) for some in (ones, two))
    for step in range(10):
        updates.step(step)
        without.step(step)
    assert torch.allclose(updates.consolidated(), without.consolidated(), atol=1e-6)
    assert torch.allclose(ones[2].theta, updates.consolidated(), atol=1e-6)


def test_ddp_steps_on_the_mean_gradient() -> None:
    one, two = replicas(1), replicas(2)
    Ddp(two).step(0)
    mean = Bowl.initial - (goal(0) + goal(1)) / 2
    one[0].update(mean, 0)
    assert torch.allclose(two[0].theta, one[0].theta)


def test_gradients_weigh_as_the_examples_that_they_are_of() -> None:
    """Of islands with 3 and 1 examples the update is that of four, of which three are alike."""
    method, whole = Ddp(replicas(2, rows=(3, 1))), replicas(1)
    for step in range(3):
        method.step(step)
        whole[0].update(whole[0].theta - (0.75 * goal(0) + 0.25 * goal(1)), step)
    assert torch.allclose(method.consolidated(), whole[0].theta, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        partial(Updates, density=1.0, bits=32, late=0),
        partial(OwnedUpdates, density=1.0, back=1.0, bits=32, late=0),
        partial(DiLoCo, every=1, outer_learning_rate=1.0, momentum=0.0),
    ],
)
def test_updates_weigh_as_the_examples_that_they_are_of(make: Any) -> None:
    """The shared parameters move by the islands' first steps as their shares say, and those who are there share all of
    it."""
    beside, ones = replicas(3), replicas(3, rows=(2, 1, 1))
    for replica in beside:
        replica.local_step(0)
    ones[2].away = True
    method = make(ones)
    method.step(0)
    if isinstance(method, Updates):
        method._apply(*method._in_flight.pop(1))
    wanted = (2 * beside[0].theta + beside[1].theta) / 3
    assert torch.allclose(method.consolidated(), wanted, atol=1e-6)


def test_diloco_moves_by_nesterov_on_the_mean_of_the_moves() -> None:
    """Two rounds of H = 2 against the paper's Algorithm 1, written out."""
    ones, beside = replicas(2), replicas(2)
    method = DiLoCo(ones, every=2, outer_learning_rate=0.7, momentum=0.9)
    theta, velocity = Bowl.initial.clone(), torch.zeros(ENTRIES)
    for rounds in range(2):
        for replica in beside:
            replica.theta.copy_(theta)
            for step in (2 * rounds, 2 * rounds + 1):
                replica.local_step(step)
        move = sum((theta - replica.theta for replica in beside), torch.zeros(ENTRIES)) / 2
        velocity = 0.9 * velocity + move
        theta = theta - 0.7 * (move + 0.9 * velocity)
        for step in (2 * rounds, 2 * rounds + 1):
            exchanged = method.step(step)
        assert [one.up_bytes for one in exchanged] == [ENTRIES * 4]
        assert torch.allclose(method.consolidated(), theta, atol=1e-6)


def test_streaming_fragments_take_turns_and_arrive_late() -> None:
    method = DiLoCo(replicas(2), every=4, outer_learning_rate=1.0, momentum=0.0, fragments=2, late=1, alpha=0.5)
    sent = {step: [(one.due, one.up_bytes) for one in method.step(step)] for step in range(10)}
    assert {step: one for step, one in sent.items() if one} == {
        3: [(5, 32 * 4.0)], 5: [(7, 32 * 4.0)], 7: [(9, 32 * 4.0)], 9: [(11, 32 * 4.0)],
    }  # fmt: skip


def test_sparseloco_loses_nothing_but_what_beta_forgets() -> None:
    ones = replicas(2)
    method = SparseLoCo(ones, every=1, density=1 / 1024, outer_learning_rate=1.0, beta=1.0)
    for step in range(3):
        method.step(step)
    assert all(torch.equal(one.theta, method.consolidated()) for one in ones)
    assert (method.consolidated() != Bowl.initial).sum() <= 2 * 4 * 3


def test_powersgd_of_full_rank_is_ddp() -> None:
    ones, exact = replicas(2), replicas(2)
    method, ddp = PowerSgd(ones, rank=2), Ddp(exact)
    for step in range(3):
        bytes_sent = method.step(step)[0].up_bytes
        ddp.step(step)
    assert bytes_sent < ENTRIES * 4
    assert (ones[0].theta - exact[0].theta).norm() < 0.5 * (exact[0].theta - Bowl.initial).norm()


RACED_ALONE_S = 2.5
"""One island with all the data, to the target of docs/performance.md (2026-11-23, three seeds)."""


RACED: Any = {
    "dense": (6.0, 1, 2 / 3, (5.9, 54.6, 542.4), (False, True, True)),
    "local-steps": (0.1444, 2, 0.0, (1.7, 1.7, 16.5), (False, False, True)),
    "stale-sparse": (0.0493, 2, 0.0, (2.0, 2.0, 6.4), (False, False, False)),
}
"""Bytes that an island sent, a parameter and step; when they are due, and how much of the step before they overlap;
seconds to the target at rho 4, 40 and 400; whether the planner calls one island sooner there."""


@pytest.mark.parametrize("strategy", RACED)
def test_the_planner_calls_one_island_sooner_only_where_it_was_in_the_race(strategy: str) -> None:
    """Where it says nothing though one island was sooner (dense at 4, stale-sparse at 400), that one won by its smaller
    batch."""
    bytes_each, due, overlap, raced_s, sooner = RACED[strategy]
    step_s, entries = 0.0123, 142_000
    sent = Exchange(0, due, bytes_each * entries, bytes_each * entries, overlap)
    lap = Lap(losses=(), exchanges=(sent,), speeds=(1.0,) * 4, steps=1)
    for rho, seconds, expected in zip((4, 40, 400), raced_s, sooner, strict=True):
        planned = asked(lap, strategy, link_of(rho, entries, 4, step_s), step_s)
        assert planned.sooner == expected
        assert not planned.sooner or seconds > RACED_ALONE_S


def test_one_island_alone_computes_the_whole_batch_at_its_own_speed() -> None:
    """Of four with 16, 8, 4 and 4 examples, which take them as long, the first has the 32 in twice that."""
    lap = Lap(losses=(), exchanges=(Exchange(0, 2, 1.0, 1.0),), speeds=(0.5,) * 4, steps=1, rows=(16, 8, 4, 4))
    assert asked(lap, "local-steps", Network(1e9, 1e9), 0.01).alone_s == pytest.approx(0.04)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("density", [0.05, 0.4, 1.0])
def test_the_blocks_of_all_tensors_at_once_are_those_of_each(density: float, bits: int) -> None:
    sizes = [64, 1024, 48 * BLOCK]
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(3))
    wanted, chosen, at = torch.zeros_like(values), 0, 0
    for size in sizes:
        one = values[at : at + size]
        mask = top_blocks(one, density)
        wanted[at : at + size][mask] = rounded(one[mask], bits)
        chosen, at = chosen + int(mask.sum()), at + size
    blocks = Blocks(sizes, density)
    assert torch.equal(blocks.part(values, bits), wanted)
    assert blocks.entries == chosen


def test_a_link_whose_rate_changes_carries_what_it_carries_at_each_time() -> None:
    """1. A second at the full rate, one at a quarter, over and over: 8 bit/s. 2. Two bytes leave at 0.5 s: four bits at
    once, two in the second after, the other ten from 2 s on. 3. Latency is no time of the link's."""
    network = Network(up_bps=8, down_bps=8, latency_s=5.0, rates=(1.0, 0.25), each_s=1.0)
    sent = Exchange(after=0, due=2, up_bytes=2, down_bytes=1)
    assert network.takes_s(sent, 0.5) == pytest.approx(0.5 + 1.0 + 1.0 + 1.0)
    done = finished_s([sent, Exchange(after=1, due=3, up_bytes=1, down_bytes=1)], 3, [0.5], network)
    assert done == [pytest.approx(0.5), pytest.approx(4.0 + 5.0), pytest.approx(5.0 + 5.0)]


@pytest.mark.parametrize(("entries", "kept"), [(3 * CHUNK, 64), (2 * CHUNK + 100, 64), (CHUNK, 700), (80, 64)])
def test_the_largest_of_all_chunks_are_those_of_chunk_after_chunk(entries: int, kept: int) -> None:
    values = torch.randn(entries, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(values)
    for start in range(0, entries, CHUNK):
        part = values[start : start + CHUNK]
        index = part.abs().topk(kept).indices
        expected[start : start + CHUNK][index] = rounded(part[index], 2)
    assert torch.equal(largest_of_chunks(values, kept), expected)
