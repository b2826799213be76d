"""What rounding does to tensors on their way, and what is no rounded tensor."""

from __future__ import annotations

import pytest
import torch

from atoll.agent.runtime.rounding import BLOCK, FORMS, SMALL, Form, bytes_per_entry, coarse, fine
from atoll.errors import BadInput
from atoll.strategies.volunteer.checks import TOLERANCE, Wanted, difference

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
