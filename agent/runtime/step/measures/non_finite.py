"""Count the steps in which a loss, gradient or weight of this worker was not finite, and report them as events.

A loss is looked at in every run.backward(loss), and the smallest gradients at every update: NaN in a loss reaches them.
A strategy adds what it finds itself."""

from __future__ import annotations

from collections import deque

import torch

from atoll.agent.runtime.session.session import Session
from atoll.v1.common_pb2 import LEVEL_WARNING

SMALLEST = 4
"""Parameters of an optimizer whose gradients are looked at."""


class NonFinite:
    """Used by the training thread alone."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._found: list[str] = []  # since the last event
        self._flags: deque[tuple[str, torch.Tensor]] = deque()  # whether it is finite, on a GPU
        self._smallest: dict[int, list[torch.Tensor]] = {}  # parameters, by id of their optimizer
        self.steps = 0
        """Steps in which something was not finite."""

    def found(self, text: str) -> None:
        """Note a finding: what was not finite and what became of it."""
        self._found.append(text)

    def loss(self, loss: torch.Tensor) -> None:
        self._look(loss, "its loss")

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the smallest gradients of an optimizer that is about to step."""
        smallest = self._smallest.get(id(optimizer))
        if smallest is None:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            self._smallest[id(optimizer)] = smallest = sorted(held, key=torch.Tensor.numel)[:SMALLEST]
        for parameter in smallest:
            if type(parameter.grad) is torch.Tensor and parameter.grad.layout == torch.strided:
                self._look(parameter.grad, "a gradient")

    def end_step(self, step: int) -> int:
        """Report what was found up to the end of `step`, first, second, fourth and so on. Returns `steps`."""
        while len(self._flags) > SMALLEST + 1:  # computed a step ago, so that nobody waits for the device
            what, is_finite = self._flags.popleft()
            if not is_finite:
                self.found(f"{what} was not finite")
        texts, self._found = list(dict.fromkeys(self._found)), []
        if not texts:
            return self.steps
        self.steps += 1
        if self.steps & (self.steps - 1) == 0:
            so_far = f" ({self.steps} such steps on this worker so far)" if self.steps > 1 else ""
            self._session.notice(
                LEVEL_WARNING, f"rank {self._session.place.rank}, step {step}: {'; '.join(texts)}{so_far}"
            )
        return self.steps

    @torch.no_grad()
    def _look(self, value: torch.Tensor, what: str) -> None:
        is_finite = value.isfinite().all()
        if is_finite.device.type != "cpu":
            self._flags.append((what, is_finite))
        elif not is_finite:
            self.found(f"{what} was not finite")
