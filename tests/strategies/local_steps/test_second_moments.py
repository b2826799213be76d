"""Second moments of the whole batch: what islands tell makes each one's Adam divide by what one Adam of all would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import pytest
import torch

from atoll.strategies.shared_params.second_moments import (
    BLOCK,
    RATIO,
    WITHIN,
    SecondMoments,
    block_of,
    kept_bytes,
    span_of,
    told_after,
)
from atoll.strategies.shared_params.weighed_squares import SMALL

ENTRIES = 3 * BLOCK + 5  # a short last block
ISLANDS = 4
STEPS = 192
Gradients = Callable[[torch.Generator, int], torch.Tensor]


class Island:
    def __init__(self, *, beta2: float = 0.95, optimizer: Mapping[str, Any] | None = None) -> None:
        """optimizer: the state that another one's had."""
        self.weights = torch.nn.Parameter(torch.zeros(ENTRIES))
        self.adam = torch.optim.AdamW([self.weights], lr=1e-3, betas=(0.9, beta2))
        if optimizer is not None:
            self.adam.load_state_dict(copy.deepcopy(dict(optimizer)))
        self.moments = SecondMoments([self.adam], [self.weights])

    def update(self, gradient: torch.Tensor) -> None:
        self.weights.grad = gradient
        self.adam.step()

    @property
    def second(self) -> torch.Tensor:
        second: torch.Tensor = self.adam.state[self.weights]["exp_avg_sq"]
        return second


def trained(gradients: Gradients, beta2: float = 0.95) -> tuple[list[Island], Island, float]:
    """Islands that tell each other, one Adam of the whole batch, and the mean of v ÷ its v over the last updates."""
    random = torch.Generator().manual_seed(1)
    islands, whole, ratios = [Island(beta2=beta2) for _ in range(ISLANDS)], Island(beta2=beta2), []
    for step in range(1, STEPS + 1):
        given = [gradients(random, i) for i in range(ISLANDS)]
        for island, gradient in zip(islands, given, strict=True):
            island.update(gradient)
        whole.update(torch.stack(given).mean(0))
        if told_after(step):
            total = torch.stack([island.moments.told(1 / ISLANDS, step) for island in islands]).sum(0)
            for island in islands:
                island.moments.take(total, 1 / ISLANDS)
        elif step > STEPS // 2:
            ratios += [float(island.second.mean() / whole.second.mean()) for island in islands]
    return islands, whole, sum(ratios) / len(ratios)


def noise(random: torch.Generator, island: int) -> torch.Tensor:
    return torch.randn(ENTRIES, generator=random)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_noise_of_a_part_counts_as_much_as_it_does_in_the_whole_batch(beta2: float) -> None:
    assert trained(noise, beta2)[2] == pytest.approx(1.0, abs=0.2)  # 4 without it


def test_what_all_islands_agree_on_is_left_alone() -> None:
    ones = trained(lambda random, island: torch.ones(ENTRIES))[0]
    assert all(torch.allclose(one.second, torch.ones(ENTRIES), rtol=0.05) for one in ones)


Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.95)),
    "Adam with decay": lambda weights: torch.optim.Adam(weights, lr=0.0, betas=(0.9, 0.95), weight_decay=0.3),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=0.0, betas=(0.9, 0.95)),
}


SHAPES: Final = [
    (ENTRIES,),
    (2 * BLOCK,),
    (7, 11),
    (SMALL + BLOCK,),
    (SMALL + BLOCK + 3,),
    (SMALL // 16 + 1, 16),
    (3, 7),
]


@pytest.mark.parametrize(("make", "closure"), [*zip(MAKES.values(), (False, True, False), strict=True)], ids=MAKES)
@pytest.mark.parametrize("shape", SHAPES)
def test_v_is_the_ratio_times_its_own_entry_by_entry_whatever_gradients_come(
    make: Make, shape: tuple[int, ...], closure: bool
) -> None:
    """Gradients come in bursts, of some entries and with a factor of a million between them, after the islands told."""
    random = torch.Generator().manual_seed(1)
    weighed, plain = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    ours, theirs = make([weighed]), make([plain])
    moments = SecondMoments([ours], [weighed])
    for step in range(40):
        burst = torch.rand(shape, generator=random) < 0.1
        gradient = torch.where(burst, torch.randn(shape, generator=random) * 10.0 ** (step % 7 - 3), torch.tensor(0.0))
        if step > 20 and step % 5:
            gradient.zero_()
        for weights, optimizer in ((weighed, ours), (plain, theirs)):
            given = gradient.clone().t().contiguous().t() if len(shape) > 1 else gradient.clone()

            def made(weights: torch.nn.Parameter = weights, given: torch.Tensor = given) -> float:
                weights.grad = given
                return 0.0

            if closure:
                optimizer.step(made)
            else:
                made()
                optimizer.step()
        if step == 8:
            told_B = moments.told(0.25, 8)
            moments.take(told_B * torch.linspace(0.5, 40, len(told_B)), 0.25)
    ratio = ours.state[weighed][RATIO].repeat_interleave(block_of(weighed))[: weighed.numel()].view(shape)
    assert ratio.max() > 1 > ratio.min()
    assert torch.allclose(ours.state[weighed]["exp_avg_sq"], ratio * theirs.state[plain]["exp_avg_sq"], rtol=1e-4)
    moments.close()
    after = ours.state[weighed]["exp_avg_sq"].clone()
    weighed.grad = torch.zeros(shape)
    ours.step()
    assert (ours.state[weighed]["exp_avg_sq"] >= 0.95 * after - 1e-12).all()


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((8192, 16), 16), ((10, 50), 50), ((64, 576), 64), ((9, 300), 60), ((16, 16, 3, 3), 48), ((5, 127), BLOCK),
        ((7, 3), 9), ((7, 1), 8), ((700,), BLOCK), ((), BLOCK), ((0, 5), 10), ((5, 0), BLOCK),
    ],
)  # fmt: skip
def test_what_shares_a_ratio_is_of_whole_rows_or_within_one(shape: tuple[int, ...], block: int) -> None:
    assert block_of(torch.zeros(shape)) == block


def test_a_row_that_one_island_alone_touches_is_weighed_by_itself() -> None:
    """Of a table, as of words: neighbours are other islands', and each moves as far as with the whole batch."""
    random = torch.Generator().manual_seed(1)
    shape = (2 * ISLANDS, BLOCK // ISLANDS)
    tables = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(ISLANDS + 1)]
    adams = [torch.optim.AdamW([table], betas=(0.9, 0.99)) for table in tables]
    moments = [SecondMoments([adam], [table]) for adam, table in zip(adams[1:], tables[1:], strict=True)]
    for step in range(1, STEPS + 1):
        for island, table in enumerate(tables[1:]):
            table.grad = torch.zeros(shape)
            table.grad[island::ISLANDS] = torch.randn(2, shape[1], generator=random)
        tables[0].grad = torch.stack([table.grad for table in tables[1:] if table.grad is not None]).mean(0)
        for adam in adams:
            adam.step()
        if told_after(step):
            total_B = torch.stack([one.told(1 / ISLANDS, step) for one in moments]).sum(0)
            for one in moments:
                one.take(total_B, 1 / ISLANDS)
    whole = adams[0].state[tables[0]]["exp_avg_sq"]
    for island, (adam, table) in enumerate(zip(adams[1:], tables[1:], strict=True)):
        own = adam.state[table]["exp_avg_sq"][island::ISLANDS]
        assert torch.allclose(own.mean(1), whole[island::ISLANDS].mean(1), rtol=0.25)  # four times as much by blocks


def test_an_update_divides_by_the_root_of_the_weighed_moment() -> None:
    """Of the newest gradient too, which is a hundred times those before: not by what is made of it afterwards."""
    weights = torch.nn.Parameter(torch.zeros(ENTRIES))
    adam = torch.optim.AdamW([weights], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    moments = SecondMoments([adam], [weights])
    for step in range(1, 12):
        weights.grad = torch.full((ENTRIES,), 1.0 if step < 11 else 100.0)
        before = weights.detach().clone()
        adam.step()
        if step == 8:
            moments.take(moments.told(0.25, 8), 0.25)
    state = adam.state[weights]
    assert (state[RATIO] < 0.5).all()
    root = (state["exp_avg_sq"] / (1 - 0.95**11)).sqrt()
    expected = 0.1 * state["exp_avg"] / (1 - 0.9**11) / (root + 1e-8)
    assert torch.allclose(before - weights.detach(), expected, rtol=1e-4)


def test_what_stands_still_does_not_move_further_and_further() -> None:
    """Gradients that end: what Adam still moves by its momentum decays, also of an island whose v is a small part."""
    islands = trained(noise)[0]
    moved = []
    for _ in range(60):
        before = islands[0].weights.detach().clone()
        islands[0].update(torch.zeros(ENTRIES))
        moved.append(float((islands[0].weights.detach() - before).abs().max()))
    assert moved[-1] < 0.05 * moved[0]
    assert max(moved) <= 1.01 * moved[0]


def test_what_concerns_one_island_counts_more_there_and_less_elsewhere_within_bounds() -> None:
    """Three islands have a thousandth of the first one's noise. One Adam of the whole batch would have a sixteenth of
    the first's v for all; islands go towards that by as much as is safe."""
    islands, _, _ = trained(lambda random, island: noise(random, island) * (1.0 if island == 0 else 1e-3))
    assert float(islands[0].adam.state[islands[0].weights][RATIO].mean()) == pytest.approx(1 / ISLANDS**2, rel=0.3)
    for island in islands[1:]:
        assert torch.allclose(island.adam.state[island.weights][RATIO], torch.tensor(WITHIN * ISLANDS))


@pytest.mark.parametrize("told", [False, True])
def test_who_goes_on_from_a_checkpoint_has_the_same_moments(told: bool) -> None:
    """1. An island's optimizer is saved five updates after it took what was told, or when what it told is being
    summed. 2. Another goes on with it: the same bits, and it tells the same."""
    island = trained(noise)[0][0]
    random = torch.Generator().manual_seed(2)
    for _ in range(5):
        island.update(noise(random, 0))
    if told:
        total = island.moments.told(1 / ISLANDS, 64) * ISLANDS
    again = Island(optimizer=island.adam.state_dict())
    for _ in range(5):
        gradient = noise(random, 0)
        for one in (island, again):
            one.update(gradient.clone())
        assert torch.equal(island.second, again.second)
    if told:
        assert again.moments.told_after == 64
        assert torch.equal(again.moments.told_last(), island.moments.told_last())
        for one in (island, again):
            one.moments.take(total, 1 / ISLANDS)
        assert torch.equal(island.second, again.second)
        assert again.moments.told_after == 0
    assert torch.equal(*(one.moments.told(1 / ISLANDS, 128) for one in (island, again)))


def test_what_16_bits_do_not_hold_is_told_anew() -> None:
    """torch casts what it loads to the parameter's dtype."""
    weights = torch.nn.Parameter(torch.zeros(ENTRIES, dtype=torch.bfloat16))
    adam = torch.optim.AdamW([weights])
    moments = SecondMoments([adam], [weights])
    weights.grad = torch.ones_like(weights)
    adam.step()
    moments.told(0.5, 8)
    assert moments.told_after == 8
    adam.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert SecondMoments([adam], [weights]).told_after == 0


@pytest.mark.parametrize("kind", ["foreach", "fused", "closure", "large"])
@pytest.mark.parametrize(("dtype", "beta2"), [(torch.bfloat16, 0.95), (torch.float16, 0.999)])
def test_moments_of_16_bits_are_summed_in_float32_and_never_negative(
    dtype: torch.dtype, kind: str, beta2: float
) -> None:
    """A ratio of 0.5 %, as of an island with a share of 2 %: bursts after zeros made v negative, and weights NaN."""
    random = torch.Generator().manual_seed(1)
    entries = SMALL + BLOCK + 3 if kind == "large" else ENTRIES
    weights = torch.nn.Parameter(torch.zeros(entries, dtype=dtype))
    options = {} if kind in {"closure", "large"} else {kind: True}
    adam = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, beta2), eps=1e-4, **options)  # float16 has no 1e-8
    moments = SecondMoments([adam], [weights])
    expected = torch.zeros(entries)
    for step in range(60):
        burst = torch.rand(entries, generator=random) < 0.2
        gradient = torch.where(burst, torch.randn(entries, generator=random) * 10.0 ** (step % 3 - 1), 0.0).to(dtype)
        if step < 8 and step % 2:
            gradient[::2] = 0  # v of these entries is 0 when the ratio comes

        def made(gradient: torch.Tensor = gradient) -> float:
            weights.grad = gradient
            return 0.0

        adam.step(made) if kind == "closure" else (made(), adam.step())
        state = adam.state[weights]
        second = state["exp_avg_sq"]
        if step == 7:
            moments.take(moments.told(0.02, 8) * 1e-3, 0.02)
            assert (state[RATIO] == 0.02 / WITHIN).all()
        elif step > 7:
            summed = beta2 * expected + 0.02 / WITHIN * (1 - beta2) * gradient.float().square()
            assert torch.equal(second, summed.to(dtype)) or torch.allclose(second.float(), summed, rtol=0.02, atol=1e-6)
        expected = second.float()
        assert second.min() >= 0
        assert weights.isfinite().all()


def test_an_island_with_a_fiftieth_of_the_batch_trains_bf16_as_one_adam_of_the_whole_batch_does() -> None:
    """Shares 98:2, an embedding and a linear layer in bfloat16, against plain Adam on the whole batch."""
    random, shares = torch.Generator().manual_seed(1), (0.98, 0.02)

    def made() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(200, 16), torch.nn.Linear(16, 4)).bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    islands, (whole, whole_adam) = [made() for _ in shares], made()
    moments = [SecondMoments([adam], list(model.parameters())) for model, adam in islands]
    losses = []

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(words).float(), words % 4)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    for step in range(1, 121):
        words = torch.randint(200, (100,), generator=random)
        parts = words[:98], words[98:]
        losses += [train(*island, part) for island, part in zip(islands, parts, strict=True)]
        train(whole, whole_adam, words)
        if told_after(step):
            total = torch.stack([one.told(share, step) for one, share in zip(moments, shares, strict=True)]).sum(0)
            for one, share in zip(moments, shares, strict=True):
                one.take(total, share)
    assert torch.tensor(losses).isfinite().all()
    for (model, adam), share in zip(islands, shares, strict=True):
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            second, plain = adam.state[mine]["exp_avg_sq"], whole_adam.state[theirs]["exp_avg_sq"]
            assert second.min() >= 0
            if share < 0.5 or mine.dim() == 1:
                continue
            assert second.float().mean() == pytest.approx(float(plain.float().mean()), rel=0.5)


def test_what_is_kept_beside_moments_is_counted_before_it_is_there() -> None:
    """While a second sum is under way, an optimizer has all that it ever has."""
    island = Island()
    for step in (8, 16):
        island.update(torch.ones(ENTRIES))
        total = island.moments.told(1.0, step)
        kept = sum(
            one.nbytes
            for name, one in island.adam.state[island.weights].items()
            if name.startswith(("whole", "told")) and isinstance(one, torch.Tensor)
        )
        if step == 8:
            island.moments.take(total, 1.0)
    assert kept == kept_bytes(island.weights)


def test_one_island_alone_has_its_own_again() -> None:
    island = trained(noise)[0][0]
    island.moments.forget()
    before, gradient = island.second.clone(), torch.ones(ENTRIES)
    island.update(gradient)
    assert torch.allclose(island.second, 0.95 * before + 0.05 * gradient.square())
    assert set(island.adam.state[island.weights]) == {"step", "exp_avg", "exp_avg_sq"}


def test_what_no_adam_has_is_neither_told_nor_changed() -> None:
    weights, bias = torch.nn.Parameter(torch.zeros(BLOCK)), torch.nn.Parameter(torch.zeros(3))
    moments = SecondMoments([torch.optim.SGD([weights], lr=1.0, momentum=0.9)], [weights, bias])
    assert len(moments) == 0
    adam = torch.optim.AdamW([weights], amsgrad=True)
    assert len(SecondMoments([adam], [weights])) == 0


def test_a_parameter_without_an_update_yet_tells_nothing() -> None:
    island = Island()
    assert torch.equal(island.moments.told(0.5, 8), torch.zeros(4))
    island.moments.take(torch.ones(4), 0.5)
    assert RATIO not in island.adam.state.get(island.weights, {})


def test_an_overflow_is_told_to_nobody() -> None:
    island = Island()
    island.update(torch.full((ENTRIES,), torch.inf))
    assert torch.equal(island.moments.told(0.5, 8), torch.zeros(4))


def test_islands_tell_at_the_same_updates() -> None:
    """What is told is taken before anything is told again."""
    told = [one for one in range(1, 300) if told_after(one)]
    assert told == [8, 16, 32, 64, 128, 192, 256]
    assert all(one + span_of(one) <= after for one, after in pairwise(told))
