"""What rounding does to weights and gradients, and that server and client have the same."""

from __future__ import annotations

import pytest
import torch

from atoll.errors import BadInput
from atoll.strategies.volunteer.checks import TOLERANCE, Wanted, difference
from atoll.strategies.volunteer.rounding import (
    BLOCK,
    FORMS,
    SMALL,
    Form,
    WeightsLine,
    applied,
    bytes_per_entry,
    coarse,
    fine,
)

BOUND = {"float32": 0.0, "bfloat16": 2**-8, "int8": BLOCK**0.5 / 254}
SIZES = (SMALL, SMALL + 1, 2 * SMALL - 1, 40 * BLOCK)


def entries(kind: str, size: int) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(size))
    match kind:
        case "normal":
            return drawn
        case "one large":  # of each block: the worst that a common scale can meet
            return torch.where(torch.arange(size) % BLOCK == 0, 127.0, 0.49 * drawn.sign())
        case "tiny":
            return drawn * 1e-30
        case _:
            return torch.zeros(size)


def wanted_of(tensor: torch.Tensor) -> list[Wanted]:
    return [(tuple(tensor.shape), tensor.dtype)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "one large", "tiny", "zeros"])
def test_rounding_is_within_its_bound_and_below_what_a_lie_differs_by(form: Form, size: int, kind: str) -> None:
    value = entries(kind, size)
    sent = coarse(value, form)
    found = fine(sent, wanted_of(value), form)
    assert difference(found, [value]) <= BOUND[form] <= TOLERANCE
    assert sum(one.nbytes for one in sent) <= bytes_per_entry(form) * size + 4


def test_numbers_that_are_none_arrive_as_such() -> None:
    value = torch.ones(SMALL)
    value[7] = float("nan")
    for form in FORMS:
        assert not torch.isfinite(fine(coarse(value, form), wanted_of(value), form)[0]).all()


def test_small_tensors_and_other_dtypes_stay_as_they_are() -> None:
    for one in (torch.randn(SMALL - 1), torch.arange(2 * SMALL)):
        for form in FORMS:
            assert coarse(one, form)[0] is one


def test_shapes_survive_and_each_answer_is_told_apart() -> None:
    answer = [torch.randn(32, SMALL), torch.randn(1), torch.randn(3 * SMALL)]
    wanted = [each for one in answer for each in wanted_of(one)]
    for form in FORMS:
        sent = [piece for one in answer for piece in coarse(one, form)]
        assert [one.shape for one in fine(sent, wanted, form)] == [one.shape for one in answer]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [torch.zeros(SMALL, dtype=torch.int8)],
        [torch.zeros(SMALL, dtype=torch.int8), torch.zeros(1)],
        [torch.zeros(SMALL - 1, dtype=torch.int8), torch.zeros(SMALL // BLOCK)],
        [torch.zeros(SMALL), torch.zeros(SMALL // BLOCK)],
        [torch.zeros(SMALL, dtype=torch.int8), torch.zeros(SMALL // BLOCK, dtype=torch.float64)],
        [*coarse(torch.ones(SMALL), "int8"), torch.zeros(1)],
    ],
)
def test_what_is_no_int8_is_refused(wrong: list[torch.Tensor]) -> None:
    with pytest.raises(BadInput, match="int8"):
        fine(wrong, wanted_of(torch.ones(SMALL)), "int8")


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
