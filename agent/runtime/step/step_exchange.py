"""The exchange of a step with the other ranks: a strategy's capability, and what every run has beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.step.backward.phases import OneWorker
from atoll.agent.runtime.step.backward.reduction import ReducedGradients
from atoll.agent.runtime.step.capabilities import (
    AloneReducer,
    Engine,
    EngineParts,
    LocalUpdate,
    Norms,
    Pass,
    SeparateReducer,
    StepEvents,
    StepPhases,
    TensorReducer,
    WorkerContext,
    WorkerHalf,
)
from atoll.agent.runtime.step.optimizers.prepared_parameters import PreparedParameters
from atoll.agent.runtime.step.optimizers.sparse_gradients import refuse_dense_optimizers, refuse_sparse_modules
from atoll.agent.runtime.step.plans.agreement import Agreed, Agreement, Meeting, ProposalExchange
from atoll.agent.runtime.step.state.durable import Handover, NothingBeside, Origin
from atoll.agent.runtime.transport.channel import LINGER_S, Channel
from atoll.agent.runtime.transport.meter import LinksInUse
from atoll.agent.runtime.transport.proposals import ReducedProposals
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import load
from atoll.v1.common_pb2 import LinkSample


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Of one step, for telemetry; zeros where a capability has no such thing."""

    sync_s: float = 0.0  # what all reductions but the last took, without the gaps between them
    last_sync_s: float = 0.0  # the last one
    metrics: Mapping[str, float] = field(default_factory=dict)  # those that the strategy declares


class StepExchange:
    """Used by the training thread alone. Methods raise PeerLost where a peer is gone."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        events: StepEvents,
        busy: Callable[[bool], None],
        copied_beside: Callable[[], Mapping[int, int]],
        agreed: Agreed,
        engine_parts: EngineParts | None,
        learned: object = None,
    ) -> None:
        """busy: told when training fills the links, and when it does no more; on any thread. copied_beside: bytes of
        copies of checkpoints that links carried while they were busy, by peer; asked by any thread. agreed: what holds
        before the first pass. engine_parts: where the script leaves the step to an engine. learned: in the view
        before. Raises BadInput for what the strategy cannot train."""
        self._channel = Channel(session, busy)
        self._copied_beside = copied_beside
        strategy = registry.of(session.strategy)
        self._session = session
        context = WorkerContext(
            session=session,
            settings=session.strategy,
            model=model,
            optimizers=optimizers,
            events=events,
            channel=self._channel,
            scheduler=StrategyChannel(session.link, strategy),
            engine_parts=engine_parts.in_view(session.place) if engine_parts is not None else None,
            learned=learned,
        )
        half: WorkerHalf = load(strategy.worker)(context)
        group = session.group
        self.durable, self._measures, self.learned = half.durable, half.measures, half.learned
        self.needs_rollback = not isinstance(half.durable, NothingBeside)
        """Whether a peer that is lost takes something along that nobody else has, as residuals, or ranks were in
        different rounds: the run goes on from where all of it is in memory."""
        self._links = half.links
        self._local = half.capability if isinstance(half.capability, LocalUpdate) else None
        self.engine = half.capability if isinstance(half.capability, Engine) else None
        if engine_parts is not None and self.engine is None:
            raise BadInput(
                f"run.prepare_pipeline needs a strategy with an engine of its own, and {strategy.name} has none. Use "
                'strategy "groups", or run.prepare'
            )
        if isinstance(half.capability, SeparateReducer):
            refuse_dense_optimizers(model, optimizers)
        else:
            refuse_sparse_modules(model)
        self._reducer: TensorReducer | None = None
        self._reduced: ReducedGradients | None = None
        self._alone: AloneReducer | None = None
        self._phases: StepPhases
        proposals: ProposalExchange | None = ReducedProposals(group) if group is not None else None
        if self._local is not None:
            self._phases = self._local
            proposals = self._channel.proposals if group is not None else None
        elif isinstance(half.capability, TensorReducer) and group is not None:
            self._reducer = half.capability
            self._phases = self._reduced = ReducedGradients(model, half.capability, events, busy, group.gather_rows)
        else:
            self._phases = OneWorker()
            self._alone = half.capability if isinstance(half.capability, AloneReducer) else None
        lag = self._local.lag if self._local is not None else 0
        self._prepared = PreparedParameters(model, optimizers) if group is not None else None
        self._proposals = proposals
        self._agreement = Agreement(proposals, agreed, lag=lag, deadline_s=session.collective_timeout_s)
        self._waited_s = self._stall_s = 0.0
        self._sent_bytes = 0  # before this step

    @property
    def combines(self) -> bool:
        """Whether every step has the gradient of the whole batch, or an engine of its own."""
        return self._reduced is not None or self.engine is not None

    @property
    def weighs_gradients(self) -> bool:
        """Whether a pass's weight counts: not in torch's own backward pass of a single worker."""
        return self._reduced is not None or self._local is not None

    @property
    def why_not_in_place(self) -> str | None:
        """Why the run cannot go on with other workers, by the strategy; None where it can."""
        return self.engine.why_not_in_place if self.engine is not None else None

    @property
    def tolerates_loss_mid_step(self) -> bool:
        """Whether a step goes on where a peer is lost in it, and is made without it."""
        return self.engine is not None and self.engine.tolerates_loss_mid_step

    @property
    def step_is_atomic(self) -> bool:
        """Whether nothing of a step is left to do at the boundary after it."""
        return self.engine is not None and self.engine.why_not_in_place is None

    @property
    def lost(self) -> str | None:
        """Who was lost in the step that is over, which is whole."""
        return self.engine.lost if self.engine is not None else None

    @property
    def flush_changes(self) -> bool:
        """Whether `flush` changes the model: a checkpoint from before it is not what training ended with."""
        return self._local is not None and self._local.flush_changes

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        """Collective: all ranks are equal; training goes on at `position`, of checkpoint `origin` if there is one.

        share: this rank's, of a whole batch there."""
        if self._local is not None:
            self._local.start(position, share, origin)
        elif self._reducer is not None:
            self._reducer.start(origin)
        elif self.engine is not None:
            self.engine.start()
        elif self._alone is not None:
            self._alone.start_alone(origin)
        if (link := self._session.link) is not None:
            link.outbox.links_so_far = self.links

    def expect_local(self) -> None:
        """The next passes may be local."""
        self._phases.expect_local()

    def begin(self, opened: Pass, own: Agreed) -> None:
        """A backward pass begins. own: what this rank knows. A local one is agreed upon with nobody. Raises BadInput
        where something is trained that was not at run.prepare."""
        if self._prepared is not None:
            self._prepared.check()
        if opened.local:
            self._agreement.pass_alone()
        else:
            self._agreement.propose(opened.batch, own)
        self._phases.begin(opened)
        if self._local is not None:
            self._agreement.lag = self._local.lag

    def end(self) -> Norms:
        """It is over. What is not of the same batch on all ranks is not used: raises BadInput."""
        self._phases.backward_done()
        if self._local is None:
            self._waited_s += self._agreement.act()
        return self._phases.combined()

    def agree(self, own: Agreed) -> Agreed:
        """At a boundary: what all ranks know alike by now."""
        self._waited_s += self._agreement.act()
        if self._agreement.must_meet:
            self._agreement.meet(Meeting.UPDATE, own)  # sends no update before: that is a collective
        return self._agreement.reached(own)

    def before_update(self) -> None:
        self._phases.before_update()

    def after_update(self) -> None:
        self._phases.after_update()
        if self.engine is None:  # which makes as many in a step as it likes
            self._agreement.updated()

    def clip(self, max_norm: float) -> bool:
        """Whether the strategy clips the next combined update itself. False: p.grad holds it, clip that."""
        return self._phases.clip(max_norm)

    def boundary(self, *, wait: bool) -> None:
        """Between two steps. wait: until every update is in the weights, on every rank alike."""
        self._phases.boundary(wait=wait)

    def batch_over(self) -> None:
        """The script has done with a batch."""
        self._agreement.batch_over()

    def meet(self, meeting: Meeting, own: Agreed) -> None:
        """Wait until every rank calls this between the same two passes. own: what this rank knows. Raises BadInput
        where another rank does something else, or has made another number of updates."""
        if self._local is not None:
            self._local.send_update()  # or a rank that does not meet would wait for it, and not say what it does
        self._agreement.meet(meeting, own)

    def flush(self, meeting: Meeting, own: Agreed) -> None:
        """Make the model the same on every rank, all ranks together. Arguments and what it raises: as `meet`."""
        self.meet(meeting, own)
        self._phases.boundary(wait=True)
        self._phases.flush()

    def show_shared(self) -> None:
        """Give parameters the values that a checkpoint of this moment holds, until `show_own`; the same on every rank.
        After `meet`, for it waits for all ranks' updates."""
        if self._local is not None:
            self._local.show_shared()

    def show_own(self) -> None:
        """Give parameters back the values that this rank trains."""
        if self._local is not None:
            self._local.show_own()

    def hand_over(self, step: int, own: Agreed, *, keeps_unsent: bool) -> Handover:
        """All ranks together, at a boundary at which they leave their view: what there is beside model and optimizer.
        keeps_unsent: each keeps its own, on all alike. own, and what it raises: as `meet`."""
        rolling = self.durable.rolling()
        own_moments = rolling is not None and rolling.own_moments
        if keeps_unsent:
            self.meet(Meeting.SYNCHRONIZE, own)
            self._phases.boundary(wait=True)
            shared, own_state = self.durable.without_flush()
            return Handover(replace(self._origin(step, shared), own=[own_state]), {}, own_moments)
        self.flush(Meeting.SYNCHRONIZE, own)
        unsent = {name: one.cpu().clone() for name, one in self.durable.own_after_flush().items()}
        if (group := self._session.group) is not None:
            for one in unsent.values():
                group.sum_in_place(one, "handing over what was not sent")
        return Handover(self._origin(step, self.durable.shared()), unsent, own_moments)

    def _origin(self, step: int, shared: Mapping[str, torch.Tensor]) -> Origin:
        session = self._session
        copied = {name: one.clone() for name, one in shared.items()}
        return Origin(session.run, session.view, step, session.place.world_size, copied)

    def check_alike(self) -> None:
        """Raises BadInput where a peer is known to be in another pass, or to have made other updates."""
        if self._proposals is not None:
            self._proposals.check()

    def waited(self) -> float:
        """Seconds the training thread waited for others since the last call."""
        waited_s, self._waited_s = self._waited_s + self._phases.waited(), 0.0
        self._stall_s += waited_s
        return waited_s

    def take_step(self) -> StepNumbers:
        """Of the step that ends."""
        sync_s, last_sync_s = self._reduced.take_times() if self._reduced is not None else (0.0, 0.0)
        stall_s, self._stall_s = self._stall_s, 0.0
        before, self._sent_bytes = self._sent_bytes, self._bytes_so_far()
        metrics = self._measures.take_step(stall_s, self._sent_bytes - before) if self._measures is not None else {}
        return StepNumbers(sync_s, last_sync_s, metrics)

    def statistics(self) -> Mapping[str, float]:
        """Since the run began, for people."""
        if self._measures is None:
            return {}
        return {**self._measures.statistics(), "sent_bytes": float(self._bytes_so_far())}

    def links(self) -> list[LinkSample]:
        """What this rank's connections carried since the run began. By any thread."""
        samples, copied_bytes = self._channel.link_samples(), self._copied_beside()
        for sample in samples:
            sample.copied_bytes = copied_bytes.get(sample.peer, 0)
        return [*samples, *(self._links() if self._links is not None else ())]

    def links_in_use(self) -> LinksInUse | None:
        """Of connections to other islands, from any thread; None where the strategy has none of its own."""
        return self._channel.in_use()

    def break_off(self) -> None:
        """A peer is gone: what is under way counts for nothing, and nothing but `close` is called any more."""
        self._phases.break_off()

    def abort(self, reason: str) -> None:
        """What waits for peers is not to wait any longer. By any thread."""
        self._channel.abort(reason)

    def leave(self) -> None:
        """All training is done, or all ranks stop at this boundary: peers need nothing more of this one."""
        self._channel.leave()

    def close(self, *, followed: bool = False) -> None:
        """followed: by the exchange of the run's next view; others wait for nothing of this rank."""
        if followed:
            self._phases.break_off()
        self._phases.close()
        if self.engine is not None:
            self.engine.close(followed=followed)
        if self._alone is not None:
            self._alone.close()
        self._channel.close(linger_s=0.0 if followed else LINGER_S)

    def _bytes_so_far(self) -> int:
        return self._channel.sent_bytes() + (self._reduced.sent_bytes() if self._reduced is not None else 0)
