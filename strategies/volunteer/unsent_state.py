"""State that volunteers have from their own script alone, and whether the rank's script has changed it since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.tensorfile import digest_of
from atoll.strategies.volunteer.stage_passes import state_of


class UnsentState:
    """Persistent buffers, parameters that do not train, and layers' modes (train or eval) of one stage.

    Volunteers are sent trained parameters. All else is as the script made it up to run.prepare_pipeline."""

    def __init__(self, stage: nn.Module, sent: Iterable[nn.Parameter]) -> None:
        known = {id(one) for one in sent}
        self._stage = stage
        self._tensors = {n: one for n, one in state_of(stage) if id(one) not in known and one.layout is torch.strided}
        self._digests = {name: digest_of(one) for name, one in self._tensors.items()}
        self._versions = {name: one._version for name, one in self._tensors.items()}
        self._modes = {name: one.training for name, one in stage.named_modules()}
        self._rewritten: set[str] = set()

    def rewritten(self) -> Sequence[str]:
        """Return the names of what is not, or was once not, as it was made."""
        moved = [name for name, one in self._tensors.items() if one._version != self._versions[name]]
        self._versions |= {name: self._tensors[name]._version for name in moved}
        self._rewritten |= {name for name in moved if digest_of(self._tensors[name]) != self._digests[name]}
        layers = self._stage.named_modules()
        self._rewritten |= {f"{name}.training".lstrip(".") for name, one in layers if one.training != self._modes[name]}
        return sorted(self._rewritten)
