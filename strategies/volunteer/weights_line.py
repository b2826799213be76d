"""The weights that a rank sends its volunteers: rounded for thin links (agent/runtime/rounding.py), by less than
answers may differ before they count as other gradients (checks.TOLERANCE)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from atoll.agent.runtime.rounding import Form, coarse, fine
from atoll.errors import BadInput
from atoll.strategies.volunteer.checks import Wanted

_KEPT: Final[dict[Form, int]] = {"float32": 0, "bfloat16": 1, "int8": 3}
"""Changes that together are smaller than the weights themselves."""


class WeightsLine:
    """Weights that the clients of one form have: near the server's own, and the same for all.

    Clients with older ones get the coarse changes since then. Each change leads from what clients have to what they
    should have, so that roundings do not add up. Clients with none, or too old ones, get all weights."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._reference_P: torch.Tensor | None = None  # as clients of `_version` have it
        self._version = -1
        self._changes: deque[tuple[int, list[torch.Tensor]]] = deque(maxlen=_KEPT[form])  # by the version they are of

    def to(self, has: int, version: int, weights: Callable[[], torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Return the tensors for a client with weights of version `has` (-1: none), and how many changes these are;
        0: whole weights. version, weights: the server's own, float32 [P]."""
        if self._form == "float32":
            return [weights()], 0
        if self._reference_P is None:
            self._reference_P, self._version = weights().clone(), version
        elif self._version != version:
            change = coarse(weights() - self._reference_P, self._form)
            applied(self._reference_P, change, self._form)
            self._changes.append((self._version, change))
            self._version = version
        since = [change for of, change in self._changes if of >= has]
        if has >= 0 and any(of == has for of, _ in self._changes):
            return [one for change in since for one in change], len(since)
        return [self._reference_P.clone()], 0


def applied(reference_P: torch.Tensor, changes: Sequence[torch.Tensor], form: Form, count: int = 1) -> None:
    """Add them to a client's weights, in place. Raises BadInput for other ones."""
    wanted: list[Wanted] = [((reference_P.numel(),), torch.float32)]
    pieces = len(changes) // max(1, count)
    for begin in range(0, len(changes), pieces or 1):
        (change_P,) = fine(changes[begin : begin + pieces], wanted, form)
        if change_P.shape != reference_P.shape:
            raise BadInput(f"a change of {tuple(change_P.shape)} came for weights of {tuple(reference_P.shape)}")
        reference_P += change_P
