"""The sparse optimizers against torch.optim in float64: on touched blocks torch's step, elsewhere nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import block_coo
import native_parts
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_rules import adam_blocks, sgd_blocks

from atoll.errors import BadInput
from atoll.kernels import compress

SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 1023, 1025, 2**18 + 1]
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd, decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
}


class Ours:
    """Parameters, moments and the rule of one entry of RULES."""

    def __init__(self, name: str, shared_param: torch.Tensor, **options: Any) -> None:
        self.name, self.shared_param = name, shared_param.clone()
        self.options = {**RULES[name][1], **options}
        self.first, self.second = torch.zeros_like(shared_param), torch.zeros_like(shared_param)

    def step(self, step: int, index: Any, values: torch.Tensor, **more: Any) -> int:
        options = dict(self.options)
        if self.name.startswith("adam"):
            beta1, beta2 = options.pop("betas", (0.9, 0.999))
            return adam_blocks(
                self.shared_param, index, values, step=step, first_moment=self.first, second_moment=self.second,
                decoupled=self.name == "adamw", epsilon=options.pop("eps", 1e-8), beta1=beta1, beta2=beta2,
                **options, **more,
            )  # fmt: skip
        buffer = self.first if "momentum" in options else None
        return sgd_blocks(self.shared_param, index, values, momentum_buffer=buffer, step=step, **options, **more)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every device."""
    cpu = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return cpu.to(torch.get_default_device())


def some_blocks(entries: int, share: float = 0.4, seed: int = 0) -> torch.Tensor:
    blocks = compress.block_count(entries)
    index = torch.zeros(int(blocks * share + 0.5), dtype=torch.int32)
    block_coo.random_blocks(seed, blocks, index)
    return index


def dense(entries: int, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(compress.block_count(entries), 16)
    out[index.long()] = values
    return out.flatten()[:entries]


def touched(entries: int, index: torch.Tensor) -> torch.Tensor:
    return dense(entries, index, torch.ones(len(index), 16)).bool()


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("entries", SIZES)
def test_touched_blocks_take_torchs_steps_and_the_others_none(name: str, entries: int) -> None:
    start, index = normal(entries), some_blocks(entries)
    where = touched(entries, index)
    kind, options = RULES[name]
    parameter = torch.nn.Parameter(start.double()[where])
    torchs, ours = kind([parameter], **options), Ours(name, start)
    for step in range(1, 5):
        values = normal(len(index), 16, seed=step)
        assert ours.step(step, index, values) == 0
        parameter.grad = dense(entries, index, values).double()[where]
        torchs.step()
    torch.testing.assert_close(ours.shared_param[where].double(), parameter.detach(), rtol=2e-5, atol=2e-6)
    assert (ours.shared_param[~where] == start[~where]).all()
    assert not ours.first[~where].any()
    assert not ours.second[~where].any()


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("entries", [1, 17, 1025, 2**18 + 1, 2**20 + 1])
def test_the_bits_do_not_depend_on_threads_or_processor(name: str, entries: int) -> None:
    start, index = normal(entries), some_blocks(entries, 0.9)
    values = normal(len(index), 16, seed=1)
    results = set()
    for how in ({"threads": 1}, {"threads": 2}, {"threads": 7}):
        ours, live = Ours(name, start), start.to(torch.bfloat16)
        last_step = torch.zeros(compress.block_count(entries), dtype=torch.int32)
        for step in (1, 3):
            ours.step(step, index, values, live=live, last_step=last_step, **how)
        buffers = (ours.shared_param, ours.first, ours.second, live.view(torch.int16), last_step)
        results.add(tuple(buffer.numpy().tobytes() for buffer in buffers))
    assert len(results) == 1


@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adam", "adamw"])
def test_a_processor_without_avx2_takes_the_same_steps(rule: str) -> None:
    start, index = normal(1025), some_blocks(1025)
    values, results = normal(len(index), 16, seed=1), set()
    for portable in (False, True):
        shared_param, first, second = start.clone(), normal(1025, seed=2), normal(1025, seed=3).abs()
        moments = (first, second) if rule.startswith("adam") else (first, None)
        native_parts.load().update_blocks(
            shared_param,
            *moments,
            None,
            None,
            index,
            values,
            rule,
            3,
            0.1,
            0.01,
            0.9,
            0.99,
            1e-8,
            0.7,
            1,
            portable=portable,
        )
        results.add((shared_param.numpy().tobytes(), first.numpy().tobytes(), second.numpy().tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 17, 1025])
def test_the_live_copy_follows_where_the_shared_param_changes(dtype: torch.dtype, entries: int) -> None:
    start, index = normal(entries) * 1e-3, some_blocks(entries, 0.6)
    live = torch.full((entries,), 7.0, dtype=dtype)
    ours = Ours("momentum", start)
    ours.step(1, index, normal(len(index), 16, seed=1) * 10, live=live)
    where = touched(entries, index)
    assert (live[where] == ours.shared_param[where].to(dtype)).all()
    assert live[~where].eq(7.0).all()


def test_a_live_copy_beyond_float16_becomes_infinite_as_in_torch() -> None:
    shared_param, live = torch.tensor([70000.0, 1e-8, -0.0, 65520.0, 65519.0]), torch.zeros(5, dtype=torch.float16)
    sgd_blocks(shared_param, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 16), lr=0.0, live=live)
    assert (live.view(torch.int16) == shared_param.half().view(torch.int16)).all()


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "adamw"])
def test_lazy_decay_makes_up_for_the_steps_a_block_was_missed(name: str) -> None:
    """Block 1 gets zeros in steps 2..4 in one run and is missed in another: in step 5 its moments agree again."""
    start, values = normal(48), normal(3, 16, seed=1)
    always, lazy = (Ours(name, start, weight_decay=0.0) for _ in range(2))
    last_step = torch.zeros(3, dtype=torch.int32)
    for step in range(1, 6):
        if 2 <= step <= 4:
            always.step(step, torch.arange(3, dtype=torch.int32), values * torch.tensor([[1.0], [0.0], [1.0]]))
            lazy.step(step, torch.tensor([0, 2], dtype=torch.int32), values[[0, 2]], last_step=last_step)
            assert last_step.tolist() == [step, 1, step]
        else:
            always.step(step, torch.arange(3, dtype=torch.int32), values)
            lazy.step(step, torch.arange(3, dtype=torch.int32), values, last_step=last_step)
    torch.testing.assert_close(lazy.first, always.first, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(lazy.second, always.second, rtol=1e-5, atol=1e-7)
    assert (lazy.shared_param[:16] == always.shared_param[:16]).all()


def test_lazy_momentum_is_the_power_of_the_steps_missed() -> None:
    buffer, last_step = torch.ones(16), torch.tensor([3], dtype=torch.int32)
    index, values = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 16)
    sgd_blocks(
        torch.zeros(16), index, values, lr=0.1, momentum=0.5, momentum_buffer=buffer, last_step=last_step, step=9
    )
    assert buffer.eq(0.5**6).all()  # missed 4..8, then the decay of step 9 itself
    assert last_step[0] == 9


@pytest.mark.parametrize("name", list(RULES))
def test_a_block_that_is_not_finite_is_left_out_whole_and_counted(name: str) -> None:
    start, index = normal(1025), some_blocks(1025)
    values = normal(len(index), 16, seed=1)
    values[3, 5], values[7, 0] = torch.nan, torch.inf
    ours = Ours(name, start)
    assert ours.step(1, index, values) == 2
    without = Ours(name, start)
    keep = [k for k in range(len(index)) if k not in (3, 7)]
    assert without.step(1, index[keep], values[keep]) == 0
    assert (ours.shared_param == without.shared_param).all()
    assert (ours.first == without.first).all()


@pytest.mark.parametrize("offset", [1, 5, 15])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_misaligned_parameters_are_updated_and_nothing_around_them(name: str, offset: int) -> None:
    entries, index = 1023, some_blocks(1023, 1.0)
    whole, values = torch.full((entries + 32,), torch.nan), normal(64, 16, seed=1)
    inside = slice(offset, offset + entries)
    whole[inside] = normal(entries)
    aligned, shifted = Ours(name, whole[inside]), Ours(name, whole[inside])
    shifted.shared_param = whole[inside]
    aligned.step(1, index, values)
    shifted.step(1, index, values)
    assert (whole[inside] == aligned.shared_param).all()
    assert whole[:offset].isnan().all()
    assert whole[offset + entries :].isnan().all()


def test_scale_clips_the_gradient_before_everything_else() -> None:
    start, index = normal(64), some_blocks(64, 1.0)
    values = normal(4, 16, seed=1)
    scaled, plain = Ours("momentum", start), Ours("momentum", start)
    scaled.step(1, index, values, scale=0.25)
    plain.step(1, index, values * 0.25)
    assert (scaled.shared_param == plain.shared_param).all()


@given(
    entries=st.integers(1, 200),
    seed=st.integers(0, 1000),
    share=st.floats(0, 1),
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_any_sgd_step_is_numpys_in_float32_bit_for_bit(
    entries: int, seed: int, share: float, momentum: float, weight_decay: float
) -> None:
    index = some_blocks(entries, share, seed)
    values, shared_param, buffer = normal(len(index), 16, seed=seed), normal(entries), normal(entries, seed=2)
    where = touched(entries, index).numpy()
    p, m = shared_param.numpy().copy(), buffer.numpy().copy()
    g = dense(entries, index, values).numpy() + np.float32(weight_decay) * p
    m = np.where(where, np.float32(momentum) * m + g, m)
    p = np.where(where, p - np.float32(0.1) * m, p)
    sgd_blocks(
        shared_param, index, values, lr=0.1, momentum=momentum, weight_decay=weight_decay, momentum_buffer=buffer
    )
    assert (shared_param.numpy() == p).all()
    assert (buffer.numpy() == m).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, momentum=0.9), "momentum = 0.9 needs momentum_buffer"),
        (lambda p, i, v: sgd_blocks(p, i + 1, v, lr=0.1), "index does not ascend, or reaches beyond the last of 2"),
        (lambda p, i, v: sgd_blocks(p, i.flip(0), v, lr=0.1), "index does not ascend"),
        (lambda p, i, v: sgd_blocks(p, i, v[:1], lr=0.1), "values has 16 entries, not 32"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=float("nan")), "lr = nan is not a finite number from 0 on"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, momentum=1.0, momentum_buffer=v), "momentum = 1.0"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, live=p), "shared_param and live share memory"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, live=p.double()), "live is float64, not float32, float16 or"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, last_step=torch.zeros(3).int()), "last_step has 3 entries, not 2"),
        (lambda p, i, v: sgd_blocks(p, i, v, lr=0.1, step=0), "step = 0 is not a step; the first is 1"),
        (
            lambda p, i, v: adam_blocks(p, i, v, lr=0.1, step=1, first_moment=torch.zeros(30), second_moment=None),
            "needs its moments; pass buffers of zeros",
        ),
        (
            lambda p, i, v: adam_blocks(
                p, i, v, lr=0.1, step=1, first_moment=torch.zeros(30), second_moment=torch.zeros(29)
            ),
            "second_moment has 29 entries, not 30",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(call: Callable[..., Any], says: str) -> None:
    shared_param, index, values = torch.ones(30), torch.arange(2, dtype=torch.int32), torch.ones(2, 16)
    with pytest.raises(BadInput, match=says):
        call(shared_param, index, values)
    assert shared_param.eq(1).all()
