"""The muted steps: what the script does in them changes nothing that others or later steps see.

They are the rehearsal of an epoch's last batch after a resume at its end, and the judged steps of a trial."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.snapshot import Tracked
from atoll.agent.runtime.session.probe import Probe
from atoll.agent.runtime.step.optimizers.batch_replay import BatchReplay


class DryRunSteps:
    """Used by the training thread alone."""

    def __init__(self, probe: Probe | None) -> None:
        self._probe = probe
        self._rehearsal: BatchReplay | None = None

    @property
    def rehearsing(self) -> bool:
        return self._rehearsal is not None

    def __call__(self) -> bool:
        """Return True if this step is a dry run."""
        return self.rehearsing or (self._probe is not None and self._probe.judging)

    def rehearse(self, model: nn.Module, optimizer: OptimizerState, tracked: Mapping[str, Tracked]) -> None:
        """Begin a rehearsal, which lasts until `end_rehearsal`."""
        self._rehearsal = BatchReplay(model, optimizer, tracked)

    def end_rehearsal(self) -> bool:
        """Put everything back; whether there was one."""
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            rehearsal.undo()
        return rehearsal is not None

    def undo_update(self) -> None:
        """optimizer.step() is done, in a muted step."""
        if self._probe is not None:
            self._probe.undo_update()
