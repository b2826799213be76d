"""Writes down what a training script did in a drill, one line for each step and rank, before the step's exchange.

A line that was written is in the kernel's hands: a SIGKILL cannot take it back. So the files say of every step which
samples a rank trained it with, and from which weights it began. torch is imported only when a model is hashed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from drill.overflow import Overflows
from drill.slow_disk import SlowDisk

if TYPE_CHECKING:
    from torch import nn

FULL_SPEED: Final = "full-speed"
"""A file of this name in the folder: the drill is over, what is left may be trained without pacing."""


class Recorder:
    """Of one rank of one run. Use with `with`.

    out: the folder that the drill named (`--out`). rank: the run's, where no agent says it. model: whose weights
    are hashed."""

    def __init__(self, out: Path, rank: int, model: nn.Module) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._disk = SlowDisk(out)
        self._overflows = Overflows(out)
        self._out, self._rank, self._model = out, rank, model
        self._run = int(os.environ.get("ATOLL_RUN", "0"))
        # Who joins a run that trains has a number of its own there, and is told its rank only with the view.
        path = out / f"run-{self._run:06d}-rank-{int(os.environ.get('ATOLL_RANK', rank)):04d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def step(self, step: int, epoch: int, samples: Sequence[int]) -> None:
        """The step that begins now, and which samples this rank trains it with. Call it before `run.backward`.

        samples: ids, 0 to the dataset's length; empty for a batch of weight 0."""
        self._disk.epoch = epoch
        line = {
            "view": int(os.environ.get("ATOLL_VIEW", "1")),
            "rank": self._rank_now,
            "step": step,
            "epoch": epoch,
            "ids": list(samples),
            "weights": self._digest(),
            "at": time.time(),
        }
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())

    def finished(self, step: int) -> None:
        """All epochs are done; the model is what training made of it. Written at once, whole or not at all."""
        path = self._out / f"final-rank-{self._rank_now:04d}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"run": self._run, "step": step, "weights": self._digest()}))
        fresh.replace(path)

    def overflows(self, step: int) -> bool:
        """Whether this rank's gradients of the step shall overflow: multiply the loss by infinity then. For scripts
        with a GradScaler."""
        return self._overflows.due(step, self._rank_now)

    @property
    def _rank_now(self) -> int:
        """In the view that this process is in."""
        return int(os.environ.get("RANK", self._rank))

    @property
    def paced(self) -> bool:
        """Whether steps shall still take their time."""
        return not (self._out / FULL_SPEED).exists()

    def _digest(self) -> str:
        import torch

        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()
