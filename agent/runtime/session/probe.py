"""A trial of `atoll profile` or `atoll advise`: a short run of the user's own script, with batch and compression that
the caller chose.

ATOLL_PROBE in the environment says which. The script is as it always is: its batch size and strategy are replaced, it
keeps no checkpoints, and ends after so many steps. What its own run.backward(loss) saw is written to a file.

Behind the steps that train, some are judged: all ranks have the same model by then, without a residual anywhere, and
what the script does to it is undone after every step. So the losses of these steps are those of the model that the job
would go on with, on samples that it was not trained on in this epoch. While it trains, a rank's loss is that of its own
weights, which have its own gradients in full whatever the compression keeps from the others.

For `atoll advise` nothing is judged: the steps of two batch sizes are timed (step_timing.py)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import torch
from torch import nn

from atoll.agent.runtime.agent_link.exits import WorkerExit, say
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.session.step_timing import StepTiming
from atoll.errors import BadInput, SettingError
from atoll.errors.exit_codes import FINISHED
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings

if TYPE_CHECKING:
    from atoll.agent.runtime.data.loader import LoaderSettings

VARIABLE: Final = "ATOLL_PROBE"
_FLUSH_S: Final = 1.0
_FLUSH_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The trial that the profiler requests."""

    directory: str  # where each rank writes its file
    steps: int = 0  # that train; 0: only tell what the script prepares
    judged_steps: int = 0  # behind them
    batch: int = 0  # of the whole job
    sparsity: float | None = None  # share left out, with the strategy below; None: the default strategy
    strategy: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # the job's, over the script's own
    seed: int = 0  # 0: the script's own
    learning_rate_factor: float = 1.0  # that a job's rule has for this batch
    timed_for: int = 0  # workers that would share the script's batch: time steps of a share; 0: time nothing


class Probe:
    """This worker's part in a trial. Methods run on the training thread."""

    def __init__(self, asked: Asked, rank: int) -> None:
        self._asked, self._rank = asked, rank
        self._file: TextIO | None = None
        # Losses stay where they are computed until the next flush.
        self._seen: list[tuple[BatchSlice, torch.Tensor]] = []
        self._flushed_s = time.monotonic()
        self._statistics: Mapping[str, float] = {}
        self._judged: list[tuple[nn.Parameter, torch.Tensor]] = []  # the weights as all ranks have them
        self._judged_from = 0
        self.timing: StepTiming | None = None
        """Timing of steps, where that is asked for."""

    @staticmethod
    def from_environment(rank: int, env: Mapping[str, str] = os.environ) -> Probe | None:
        """None where nobody asked for a trial. Raises SettingError."""
        text = env.get(VARIABLE)
        if not text:
            return None
        try:
            return Probe(Asked(**json.loads(text)), rank)
        except (ValueError, TypeError) as error:
            raise SettingError(
                VARIABLE, text[:200], f"cannot be read: {error}", "Only `atoll profile` and `atoll advise` set it"
            ) from error

    @property
    def learning_rate_factor(self) -> float:
        return self._asked.learning_rate_factor

    def seed(self, own: int) -> int:
        return self._asked.seed or own

    def strategy(self, own: StrategySettings) -> StrategySettings:
        """Return what the trial trains with in place of the script's own choice, whose other settings stay."""
        asked = self._asked
        if asked.sparsity is None:
            return registry.default().settings()
        tried = registry.find(asked.strategy)
        settings = own if isinstance(own, tried.settings) else tried.settings()
        return settings.with_values(**asked.settings, **tried.trial_settings, sparsity=asked.sparsity)

    def begin(
        self, settings: LoaderSettings, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> LoaderSettings:
        """Tell what is trained; returns how to load it. Raises WorkerExit where telling is all that is asked, BadInput
        for a stream."""
        asked = self._asked
        if not isinstance(settings.dataset, Sized) and not asked.timed_for:
            raise BadInput(
                f"atoll profile needs to know how many samples there are, and {type(settings.dataset).__name__} is a "
                "stream. Profile with a Dataset of a part of it"
            )
        self._file = Path(self._asked.directory, f"rank-{self._rank}.jsonl").open("w", encoding="utf-8")  # noqa: SIM115
        self._write({"event": "prepared", **description(settings, model, optimizers)})
        if asked.timed_for:
            samples = len(settings.dataset) if isinstance(settings.dataset, Sized) else None
            self.timing = StepTiming(settings.batch_size, asked.timed_for, samples, self._write)
            return replace(settings, batch_size=self.timing.batch)
        if asked.steps == 0:
            self.close()
            raise WorkerExit(FINISHED)
        say(f"a trial for atoll profile: batch {asked.batch}, {asked.steps} steps, sparsity {asked.sparsity}")
        return replace(settings, batch_size=asked.batch)

    def report_script(self, facts: Mapping[str, Any], *, trains: bool) -> None:
        """Write what the choice of a strategy depends on. Raises WorkerExit if the script does not train in a trial."""
        self._write({"event": "script", **facts})
        if not trains:
            self.close()
            raise WorkerExit(FINISHED)

    def saw(self, batch_slice: BatchSlice, loss: torch.Tensor) -> None:
        """run.backward(loss) for this batch; several of one batch add up, as their gradients do."""
        value = loss.detach().float()
        if self._seen and self._seen[-1][0] is batch_slice:
            self._seen[-1] = (batch_slice, self._seen[-1][1] + value)
            return
        if len(self._seen) >= _FLUSH_STEPS or time.monotonic() - self._flushed_s > _FLUSH_S:
            self._flush()
        self._seen.append((batch_slice, value))

    @property
    def judging(self) -> bool:
        """Training is over: what follows changes nothing."""
        return bool(self._judged)

    def trained(self, step: int) -> bool:
        """Return True if the training steps are done and evaluation begins. The same on every rank."""
        enough = self.timing.enough if self.timing is not None else step >= self._asked.steps
        return enough and not self.judging

    def judge(self, step: int, model: nn.Module, statistics: Mapping[str, float]) -> None:
        """Freeze the model, which is the same on every rank, for evaluation. statistics: of the training."""
        self._flush()
        self._statistics, self._judged_from = dict(statistics), step
        self._judged = [(one, one.detach().clone()) for one in model.parameters()]

    def over(self, step: int) -> bool:
        return self.judging and step >= self._judged_from + self._asked.judged_steps

    @torch.no_grad()
    def undo_update(self) -> None:
        """The script's optimizer changed the weights that are judged."""
        for parameter, kept in self._judged:
            parameter.copy_(kept)

    def end(self) -> None:
        """The trial came to its end."""
        self._flush()
        self._write({"event": "end", "statistics": self._statistics})
        self.close()

    def close(self) -> None:
        """Also where the script ended before the trial did."""
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        seen, self._seen = self._seen, []
        losses = torch.stack([value.reshape(()) for _, value in seen]).tolist() if seen else []
        for (batch_slice, _), loss in zip(seen, losses, strict=True):
            event = "judged" if self.judging else "step"
            self._write({"event": event, "step": batch_slice.step, "local": batch_slice.local, "loss": loss})
        if self._file is not None:
            self._file.flush()
        self._flushed_s = time.monotonic()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise BadInput("the trial of `atoll profile` is over; the script goes on training after its end")
        self._file.write(json.dumps(line) + "\n")


def description(
    settings: LoaderSettings, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Describe the workload. Equal workloads have equal descriptions."""
    return {
        "parameters": [
            [name, list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad]
            for name, one in model.named_parameters()
        ],
        "samples": len(settings.dataset) if isinstance(settings.dataset, Sized) else 0,
        "batch": settings.batch_size,
        "optimizer": {
            "kind": " + ".join(type(optimizer).__name__ for optimizer in optimizers),
            "groups": [
                {name: _plain(value) for name, value in sorted(group.items()) if name != "params"}
                | {"parameters": len(group["params"])}
                for optimizer in optimizers
                for group in optimizer.param_groups
            ],
        },
    }


def _plain(value: Any) -> Any:
    """An optimizer's setting as JSON holds it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return type(value).__name__
