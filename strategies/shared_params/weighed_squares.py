"""Add r times a gradient's square to Adam's second moment v, where Adam itself adds it once.

Adam computes v <- beta2 v + (1 - beta2) g². Adding factor g² to v before that, factor = (r - 1) (1 - beta2) / beta2,
leaves r (1 - beta2) g² of the newest square. float32 represents that difference for every r in use. 16 bits do not:
below an r of about 0.7 % rounding makes v negative. There, v after the update is computed in float32 and rounded
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

SMALL: Final = 65_536
"""Largest number of entries of a parameter that is weighed together with others."""
AT_ONCE: Final = 262_144
"""Entries of a larger parameter that are weighed at once."""
LEAST_OF_16_BITS: Final = 1 / 64
"""Smallest r by which v of 16 bits weighs the newest square inside the update: two roundings of bfloat16 remove up
to 1/128 of that square, and Adam takes the root of the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class WeighedSquare:
    """Moment v and gradient g of one parameter in one update.

    N entries; factor: [N] where the parameter is small, else [blocks]."""

    second_N: torch.Tensor
    gradient_N: torch.Tensor
    block: int
    factor: torch.Tensor  # (r - 1) (1 - beta2) / beta2
    beta2: float

    @property
    def is_small(self) -> bool:
        return self.second_N.numel() <= SMALL

    def add(self, weight: float) -> None:
        """Add weight times factor g² to v of float32, some rows at once."""
        for second, gradient, factor in self._rows(self.second_N):
            second.addcmul_(gradient, gradient * factor, value=weight)

    def round_into(self, before_N: torch.Tensor, *, late: bool) -> None:
        """Replace `before_N`, v of 16 bits before the update, by v after it: summed in float32, rounded once.

        Unless `late`, v itself becomes a value that is not negative, of which Adam makes nearly the same."""
        kind = torch.finfo(self.second_N.dtype)
        least, smallest = (LEAST_OF_16_BITS - 1) * (1 - self.beta2) / self.beta2, 2 * kind.smallest_normal * kind.eps
        rows = zip(self._rows(before_N), self._rows(self.second_N), strict=True)
        for (before, gradient, factor), (second, _, _) in rows:
            square = gradient.float().square()
            weighed = torch.addcmul(before.float(), square, factor)
            if not late:
                second.copy_(torch.maximum(weighed, square * least + smallest))
            before.copy_(weighed * self.beta2 + square * (1 - self.beta2))

    def _rows(self, second_N: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield some rows of `second_N`, g and factor at once.

        A factor per entry would take as much memory as the parameter. Allocating it costs more than the arithmetic."""
        if self.is_small:
            yield second_N, self.gradient_N, self.factor
            return
        seconds, gradients = by_blocks(second_N, self.block), by_blocks(self.gradient_N, self.block)
        factors = of_blocks(self.factor, second_N, self.block)
        for whole in zip(seconds, gradients, factors, strict=True):
            yield from zip(*(torch.split(one, AT_ONCE // self.block) for one in whole), strict=True)


def weigh(squares: Sequence[WeighedSquare], *, late: bool) -> None:
    """Weigh the newest square of every v of float32. late: Adam made its update already."""
    if small := [one for one in squares if one.is_small]:
        gradients = [one.gradient_N for one in small]
        scaled = torch._foreach_mul(gradients, [one.factor for one in small])
        weights = [one.beta2 if late else 1.0 for one in small]
        torch._foreach_addcmul_([one.second_N for one in small], gradients, scaled, weights)
    for one in squares:
        if not one.is_small:
            one.add(one.beta2 if late else 1.0)
        if late:
            one.second_N.clamp_min_(0)  # a weight decay within g was of the parameter before


def is_narrow(second_N: torch.Tensor) -> bool:
    """Return True if v has 16 bits."""
    return second_N.element_size() < torch.float32.itemsize


def by_blocks(flat_N: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole blocks [blocks, block], and the entries of the last one where it is short; views."""
    whole = flat_N.numel() // block * block
    return flat_N[:whole].view(-1, block), flat_N[whole:]


def of_blocks(factor_B: torch.Tensor, flat_N: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of what `by_blocks` returns."""
    whole = flat_N.numel() // block
    return factor_B[:whole, None], factor_B[whole:]
