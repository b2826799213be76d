"""Submitted by benchmarks/telemetry.py: trains blocks of steps with telemetry and without, in turn, and writes the
seconds of each step of rank 0.

"Without" takes the measuring out of the very run: no marks, no samples, no call when an all-reduce ends, no norms."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blocks import train_in_blocks
from torch import nn
from unequal_train import make

NEVER = 2**62


class NoClock:
    """A StepClock that looks at no clock."""

    def boundary_begins(self) -> None: ...

    def boundary_ends(self) -> None: ...

    def handed_out(self) -> None: ...

    def backward_begins(self, *, seen: bool) -> None: ...

    def bucket_ready(self) -> None: ...

    def backward_ends(self) -> None: ...

    def updated(self) -> None: ...

    def pay(self) -> None: ...

    def waited(self, seconds: float, *, at_boundary: bool = False) -> None: ...


def switch(run: Any) -> Callable[[bool], None]:
    """What turns the measuring of this run on and off, between two boundaries."""
    from atoll.agent.runtime.step.backward import pass_state as module
    from atoll.agent.runtime.step.state.step_reporter import Silent

    training = run._training
    reduced, boundary = training._current.driver._gradients, training._boundary
    clock, reporter, timed = training._clock, training._reporter, reduced._launch

    def untimed(bucket: Any) -> None:
        bucket.used.fill_(1)
        reduced._events.gradients_leave()
        reduced._under_way.append(reduced._reducer.reduce(bucket.flat, [True] * len(bucket.slots), lambda _: None))

    def to(measuring: bool) -> None:
        training._clock = boundary._clock = clock if measuring else NoClock()
        object.__setattr__(training._step_parts, "clock", training._clock)
        object.__setattr__(boundary._parts, "reporter", reporter if measuring else Silent())
        reduced._launch = timed if measuring else untimed
        module.NORMS_EVERY_STEPS = 10 if measuring else NEVER  # type: ignore[misc]

    return to


def main() -> None:
    import atoll

    out, blocks = Path(sys.argv[1]), int(sys.argv[2])
    run = atoll.init(seed=1)
    model, dataset = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, dataset, batch_size=256)
    measure = switch(run)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    took = train_in_blocks(run, optimizer, loader, loss, blocks=blocks, turn=lambda block: measure(block % 2 == 0))
    if run.is_main:
        out.write_text(json.dumps(took))


if __name__ == "__main__":
    main()
