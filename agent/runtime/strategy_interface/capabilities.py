"""The capabilities of a strategy's worker half: what it promises a step, and what the step loop calls therefore.

A strategy implements one of three and says which by what its `build` returns. Nobody asks for its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.channel.channel import Channel
from atoll.agent.runtime.data.sampler import BatchSlice, Position
from atoll.agent.runtime.model.durable import Durable, NothingBeside, Origin
from atoll.agent.runtime.model.model_part import ModelPart
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.session.session import Session
from atoll.errors import AtollError
from atoll.strategies.declaration import PlanParameters, StrategySettings
from atoll.v1.common_pb2 import LinkSample

Statistics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Norms:
    """Squared norms of one pass's gradients; zeros where it was not sampled.

    halves: they are of the mean gradients of the two halves of this rank's own batch: `local` is the mean of their
    squared norms, `together` the squared norm of their mean, both weighted with samples."""

    local: float = 0.0  # of this rank's own mean gradient
    together: float = 0.0  # of the combined gradient
    halves: bool = False
    batches: int = 1  # of the loader, that they are of


@dataclass(frozen=True, slots=True)
class Pass:
    """One backward pass as it begins."""

    batch: BatchSlice
    params: PlanParameters  # of the strategy, that hold in this step
    sampled: bool  # measure squared norms on the way
    muted: bool = False  # nothing of it counts, on any rank
    local: bool = False  # nothing of it leaves: gradients add up in p.grad until those of a later pass do
    loss: torch.Tensor | None = None  # [], detached; None where the script called loss.backward() itself


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Callbacks from a strategy to the step loop inside the user's forward and backward passes."""

    open_pass: Callable[[], None]  # a gradient came and no pass is open: the user called loss.backward() himself
    gradients_leave: Callable[[], None]  # the next ones are about to
    muted: Callable[[], bool]  # nothing counts of what the script does now
    loss_scale: Callable[[], float]  # a GradScaler's factor on the losses whose gradients come now
    lost: Callable[[AtollError], None]
    """Does not return where the worker leaves for it. Where the run goes on without the peer it does: what the script
    does up to its next batch counts for nothing."""
    non_finite: Callable[[str], None] = lambda text: None
    """Gradients or weights were not finite: which, and what became of them."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum over all ranks that is under way."""

    wait: Callable[[], object]  # until it is there; raises PeerLost
    sent_bytes: int  # that this rank puts on its links for it


@dataclass(frozen=True, slots=True)
class SeparateReduction:
    """A sum over all ranks of one gradient by itself, under way."""

    wait: Callable[[], torch.Tensor | None]  # until it is there: the sum, None where no rank had one; raises PeerLost
    sent_bytes: int  # that this rank puts on the links of torch.distributed for it


@runtime_checkable
class TensorReducer(Protocol):
    """The gradient of the whole batch, the same on every rank, in this step."""

    def start(self, origin: Origin | None) -> None:
        """All ranks are equal; training continues, of the checkpoint `origin` where there is one. Collective; raises
        PeerLost."""

    def fuse(self, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
        """Return which gradients are reduced in one piece: indices into `parameters`, each once.

        A piece has one dtype and device. Pieces leave in the returned order, which is the same on every rank.

        parameters: those that are trained, in the order in which their gradients come (the reverse of the model's)."""

    def begin(self, opened: Pass) -> None:
        """A backward pass begins, on every rank with the same plan parameters."""

    def reduce(self, flat_N: torch.Tensor, used: Sequence[bool], ended: Callable[[object], None]) -> Reduction:
        """Begin to add up flat_N, [N] of any floating dtype, over all ranks and in place; the pieces come in the order
        of `fuse` in every pass, the same on every rank: of several models those that the pass reaches. Raises PeerLost.

        used: whether this rank has a gradient of each tensor in it; as many entries at the end count that, 1 or 0, and
        of counts nothing may be lost. ended: to be called once when the sum is there, on any thread."""

    def close(self) -> None: ...


@runtime_checkable
class AloneReducer(TensorReducer, Protocol):
    """A TensorReducer that has something to do in a run of one worker too."""

    def start_alone(self, origin: Origin | None) -> None:
        """Start in a run of one worker, in place of `start`."""


@runtime_checkable
class RegroupingReducer(TensorReducer, Protocol):
    """A TensorReducer whose pieces a plan may change."""

    def regroup(self, params: PlanParameters) -> bool:
        """Apply the plan of a pass before it begins. Return True if `fuse` gives other pieces from now on.

        The same on every rank."""


@runtime_checkable
class SeparateReducer(TensorReducer, Protocol):
    """A TensorReducer that reduces some gradients each by itself, in the layout in which they come: sparse ones too."""

    def separate(self, piece: Sequence[int]) -> bool:
        """Return True if this piece of `fuse` is reduced separately; it has one parameter then."""

    def reduce_separate(
        self, parameter: int, gradient: torch.Tensor | None, weight: float, ended: Callable[[object], None]
    ) -> SeparateReduction:
        """Begin to add up weight * gradient over all ranks; comes in the order of `fuse`, as `reduce` does. Raises
        PeerLost, BadInput for a gradient that cannot be sent.

        parameter: as in `fuse`. gradient: coalesced where it is sparse, and left as it is; None: this rank has none.
        weight: 0 counts as zeros, whatever the gradient holds. ended: as in `reduce`."""


class LocalUpdate:
    """Each rank updates its own weights at once; the others' updates come later, at most `lag` passes.

    Base class of local-update methods. A method overrides what it needs: mostly `after_update` or `boundary`, which
    combine weights, and `flush`, which makes them equal everywhere. All methods run on the training thread, and raise
    PeerLost if a peer is gone. Ranks call `boundary` and `flush` together."""

    lag: int = 0
    """Proposals of so many passes back are sure to be here, because the weights of that pass must be."""

    flush_changes: bool = True
    """`flush` changes the model: a checkpoint from before it is not what training ended with."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._shown: list[torch.Tensor] = []  # this rank's weights, while the shared ones are shown

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        """Begin to train at `position`, of the checkpoint `origin` if there is one. Collective; all ranks are equal.

        share: this rank's, of a whole batch there. The default connects the channel for proposals alone."""
        if self.context.session.group is not None:
            self.context.channel.all_connected()
        self.context.channel.connect_receiver(ProposalsAlone(), [])

    def expect_local(self) -> None:
        """Prepare for passes under run.no_sync. Call before the first one."""

    def begin(self, opened: Pass) -> None:
        """A backward pass begins."""

    def backward_done(self) -> None:
        """The backward pass is over on this rank."""

    def combined(self) -> Norms:
        """Wait for what the update needs of others, and return the norms of the pass."""
        return Norms()

    def before_update(self) -> None:
        """optimizer.step() begins."""

    def after_update(self) -> None:
        """optimizer.step() is done."""

    def send_update(self) -> None:
        """Begin to send what was updated since the last boundary. Otherwise `boundary` sends it."""

    def boundary(self, *, wait: bool) -> None:
        """Bring updates into the weights between two steps. wait: all of them, the same on every rank."""

    def flush(self) -> None:
        """Make the model the same on every rank. All ranks call it together, after a boundary that waited."""

    def show_shared(self) -> None:
        """Give parameters the values that are the same on every rank. The default shows those of a flush."""
        parameters = list(self.context.model.parameters())
        self._shown = [one.detach().clone() for one in parameters]
        self.flush()

    def show_own(self) -> None:
        """Give parameters back the values that this rank trains."""
        with torch.no_grad():
            for parameter, own in zip(self.context.model.parameters(), self._shown, strict=True):
                parameter.copy_(own)

    def waited(self) -> float:
        """Return the seconds that the training thread waited for others since the last call."""
        return 0.0

    def clip(self, max_norm: float) -> bool:
        """Return True if the method clips the next combined update itself. False: p.grad holds it."""
        return False

    def break_off(self) -> None:
        """A peer is gone in the middle of the step: only `close` is called any more, and hooks do nothing."""

    def close(self) -> None:
        """Take hooks off the model, and end threads."""


class ProposalsAlone:
    """Receiver of a channel that carries proposals and no frames."""

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        return "unknown kind"

    def fail(self, reason: str) -> None:
        """Ignore a loss: proposals and collectives report it."""


@runtime_checkable
class Engine(Protocol):
    """Owns the whole step."""

    @property
    def why_not_in_place(self) -> str | None:
        """Return why the run cannot continue with other workers and a new engine; None if it can."""

    @property
    def tolerates_loss_mid_step(self) -> bool:
        """True if a step in which a peer is lost is completed without it."""

    @property
    def lost(self) -> str | None:
        """Return the peer lost in a step that the others completed without it. The run continues without it."""

    def start(self) -> None:
        """All ranks are equal; training begins. Collective; raises PeerLost."""

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """Forward pass, backward pass and optimizer.step() for this rank's part of a global batch.

        batch: what the loader gave. Returns the mean loss over this rank's part, []. Raises PeerLost."""

    def rewind(self, step: int) -> bool:
        """Put model and optimizer back to where this step began: one that raised, or the last that was whole. False:
        they cannot be."""

    def close(self, *, followed: bool = False) -> None:
        """followed: by the engine of the run's next view, which is built with what was learned here."""


class Measures(Protocol):
    """Numbers that only the strategy knows."""

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        """Return the metrics of the step that ends, as the strategy declares them.

        stall_s: the training thread waited for others. sent_bytes: on all links."""

    def statistics(self) -> Statistics:
        """Return statistics since the run began, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The loss, model part and data with which an engine trains in place of the script."""

    dataset: Dataset[Any]
    shuffle: bool
    batch_size: int  # samples of one update of one replica
    micro_batches: int  # that a batch is split into: each by itself through the model
    loss: Callable[[Any, Any], torch.Tensor]  # (what the model gave, targets) -> mean over them
    collate_fn: Callable[[list[Any]], Any]
    place: StagePlace
    part: ModelPart | None = None  # None: every worker has the whole model
    clip_norm: float | None = None  # of a batch's gradient, over all stages

    def in_view(self, place: WorkerPlace) -> EngineParts:
        """Return the parts of this worker in a view with other members. Raises BadInput if they do not form whole
        pipelines."""
        return replace(self, place=StagePlace.of(place.rank, place.world_size, self.place.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Arguments from which a strategy's worker half is built."""

    session: Session
    settings: StrategySettings  # the strategy's own
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    events: StepEvents
    channel: Channel  # for frames and proposals between ranks, from `LocalUpdate.start` on
    scheduler: StrategyChannel  # to the strategy's controller half
    engine_parts: EngineParts | None = None  # None: the script makes forward pass, backward pass and update
    learned: object = None  # as the WorkerHalf of the view before had it; None in a worker's first view


@dataclass(frozen=True, slots=True)
class WorkerHalf:
    """The result of `build` in a strategy's worker.py, which raises BadInput for what the strategy cannot train."""

    capability: TensorReducer | LocalUpdate | Engine
    durable: Durable = field(default_factory=NothingBeside)
    measures: Measures | None = None
    learned: object = None  # of links and devices, for the half of the run's next view
    links: Callable[[], list[LinkSample]] | None = None  # beside those of the channel, since the run began
