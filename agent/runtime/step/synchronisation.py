"""What a strategy is to the life of a step: how one pass's gradients become the same update on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from atoll.agent.runtime.checkpoints.disk.header import Header
from atoll.agent.runtime.data.loader import BatchSlice, Position
from atoll.agent.runtime.step.agreement import Agreed
from atoll.errors import AtollError
from atoll.strategies.declaration import PlanParameters
from atoll.v1.common_pb2 import LinkSample

Statistics = Mapping[str, float]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of one pass's gradients; zeros where it was not sampled."""

    local: float = 0.0  # of this rank's own mean gradient
    together: float = 0.0  # of the combined gradient


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a strategy asks of its run from inside the user's forward and backward passes."""

    begin: Callable[[], None]  # a gradient came and no pass is open: the user called loss.backward() himself
    before_launch: Callable[[], None]  # gradients are about to leave
    lost: Callable[[AtollError], NoReturn]
    busy: Callable[[], None] = lambda: None  # what training sends fills the links from now on; by any thread
    idle: Callable[[], None] = lambda: None  # nothing of it is under way, and nothing follows at once; by any thread


@dataclass(frozen=True, slots=True)
class Pass:
    """One backward pass as it begins: the batch, and what this rank knows that the others must agree to."""

    batch_slice: BatchSlice
    own: Agreed
    params: PlanParameters  # of the strategy, that hold in this step
    sampled: bool  # measure squared norms on the way
    muted: bool = False  # nothing of it counts, on any rank


@dataclass(frozen=True, slots=True)
class OwnState:
    """What was one rank's alone, of `rank` of the run before."""

    rank: int
    owed: Mapping[str, torch.Tensor]  # what compression held back, by layer, float32 [N]
    optimizer: Mapping[str, Any] | None  # state_dict, where each rank had its own and it is not in the checkpoint


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint from which a run goes on."""

    run: int  # that wrote it
    step: int
    world_size: int  # of that run
    extra: Mapping[str, torch.Tensor]  # what its strategy's `extra` gave; empty for one that gives nothing
    own: Sequence[OwnState] | None = None  # that this rank takes over; None: it is beside the checkpoint, on disks


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What a strategy tells of one step; zeros where it knows no such thing."""

    sync_s: float = 0.0  # dense: what all all-reduces but the last took, without the gaps between them
    last_sync_s: float = 0.0  # the last one
    metrics: Mapping[str, float] = field(default_factory=dict)  # those that the strategy declares


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a shared tensor, by name, and the memory that they go to, uint8 [end - begin]."""

    name: str
    begin: int
    end: int
    into: Bytes


class RoundState(Protocol):
    """What goes on changing in the background while training does: for checkpoints it is kept as of the round that is
    the newest at a boundary, on every rank the same, without waiting for it there."""

    @property
    def owes_moments(self) -> bool:
        """Whether the optimizer's moments are this rank's own."""

    def shared(self) -> Mapping[str, torch.Tensor]:
        """What is equal on all ranks after the same round: flat, on the CPU, always the same memory."""

    def parameters(self) -> Collection[int]:
        """id(parameter) of those that have a master."""

    def owed(self) -> Mapping[str, int]:
        """Entries, by layer, of what this rank has not sent."""

    def keep(self, parts: Sequence[Part], owed: Mapping[str, Floats]) -> None:
        """At a boundary: from now on `parts`, and into `owed` what this rank owes, are kept as of this moment."""

    def read(self) -> None:
        """On another thread, and done before the next optimizer.step(): read what that changes."""

    def take(self, stopped: Callable[[], bool]) -> bool:
        """On that thread: wait until the round is there. False if that is not to be expected any more. Raises
        DeadlineExceeded."""


class Synchronisation(Protocol):
    """Methods raise PeerLost where a peer is gone. Called on the training thread but for `freeze` and `masters`."""

    survives_update: bool
    """Whether the state is whole at any moment after `freeze`, also between optimizer.step() and the boundary."""

    finish_changes: bool
    """Whether `finish` changes the model: a checkpoint from before it is not what training ended with."""

    def start(self, position: Position, origin: Origin | None) -> None:
        """All ranks are equal; training goes on at `position`, of the checkpoint `origin` where there is one."""

    def begin(self, opened: Pass) -> None: ...

    def end(self) -> Norms:
        """The backward pass is over. Where the strategy is synchronous, waits for the combined gradients."""

    def agreed(self, own: Agreed) -> Agreed:
        """At a boundary: what all ranks know alike by now. own: what this rank knows."""

    def before_update(self) -> None:
        """optimizer.step() begins."""

    def after_update(self) -> None:
        """optimizer.step() is done."""

    def boundary(self, *, settle: bool) -> None:
        """Between two steps. settle: wait until every update is in the weights, on every rank alike."""

    def waited(self) -> float:
        """Seconds the training thread waited for others since the last call."""

    def clip(self, max_norm: float) -> bool:
        """Whether the strategy clips the next combined update itself. False: p.grad holds it, clip that."""

    def freeze(self) -> None:
        """Somebody is going to read the state, and training will not go on. By any thread."""

    def masters(self) -> Mapping[int, torch.Tensor]:
        """The parameters' true values by id(parameter), where the model's own are behind; shaped alike."""

    def extra(self) -> Mapping[str, torch.Tensor]:
        """State beside the model's and the optimizer's that a checkpoint needs. Equal on all ranks."""

    def aside(self, header: Header, *, copy: bool) -> Callable[[], None] | None:
        """What writes to disk what is this rank's alone and belongs to the checkpoint `header`; None: nothing is.

        copy: it is called while training goes on. It raises CheckpointError."""

    def rounds(self) -> RoundState | None:
        """What the background changes; None: the state stands still between a boundary and the next update."""

    def statistics(self) -> Statistics:
        """Numbers since the run began, for people."""

    def step_numbers(self) -> StepNumbers:
        """Of the step that ends, for telemetry."""

    def links(self) -> list[LinkSample]:
        """What this rank's connections carried since the run began."""

    def finish(self) -> None:
        """All training is done and settled: what is left to make the model the same on every rank."""

    def leave(self) -> None:
        """All training is done, or all ranks stop at this boundary: peers need nothing more of this one."""

    def close(self) -> None: ...


class Synchronous:
    """What a strategy does whose weights are the model's own and whose gradients never come late: nothing but torch's
    own backward and step. As it is, a run of one worker."""

    survives_update = False
    finish_changes = False

    def start(self, position: Position, origin: Origin | None) -> None: ...

    def begin(self, opened: Pass) -> None: ...

    def end(self) -> Norms:
        return Norms()

    def agreed(self, own: Agreed) -> Agreed:
        return own

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def boundary(self, *, settle: bool) -> None: ...

    def waited(self) -> float:
        return 0.0

    def clip(self, max_norm: float) -> bool:
        return False

    def freeze(self) -> None: ...

    def masters(self) -> Mapping[int, torch.Tensor]:
        return {}

    def extra(self) -> Mapping[str, torch.Tensor]:
        return {}

    def aside(self, header: Header, *, copy: bool) -> None: ...

    def rounds(self) -> None: ...

    def statistics(self) -> Statistics:
        return {}

    def step_numbers(self) -> StepNumbers:
        return StepNumbers()

    def links(self) -> list[LinkSample]:
        return []

    def finish(self) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...
