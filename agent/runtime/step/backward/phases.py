"""The phases of a step in which nobody else takes part: torch's own backward pass and optimizer.step()."""

from __future__ import annotations

from atoll.agent.runtime.step.capabilities import Norms, Pass


class OneWorker:
    """A run of one worker, and an engine's own step. What exchanges something begins from here."""

    def expect_local(self) -> None: ...

    def begin(self, opened: Pass) -> None: ...

    def backward_done(self) -> None: ...

    def combined(self) -> Norms:
        return Norms()

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def boundary(self, *, wait: bool) -> None: ...

    def flush(self) -> None: ...

    def waited(self) -> float:
        return 0.0

    def clip(self, max_norm: float) -> bool:
        return False

    def break_off(self) -> None: ...

    def close(self) -> None: ...
