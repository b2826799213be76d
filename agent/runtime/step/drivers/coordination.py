"""Coordination of the ranks of a view: one agreement, the channel between ranks, and what telemetry reads of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.agent.runtime.channel.agreement import Agreed, Agreement, Meeting, ProposalExchange
from atoll.agent.runtime.channel.channel import Channel
from atoll.agent.runtime.model.prepared_parameters import PreparedParameters
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.strategy_interface.capabilities import Measures, Pass
from atoll.v1.common_pb2 import LinkSample


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers of one step for telemetry; zero where a driver has none."""

    sync_s: float = 0.0  # what all reductions but the last took, without the gaps between them
    last_sync_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # those that the strategy declares


class Coordination:
    """Part that every driver has. Used by the training thread, but for `links`."""

    def __init__(
        self,
        session: Session,
        channel: Channel,
        proposals: ProposalExchange | None,
        agreed: Agreed,
        *,
        lag: int,
        prepared: PreparedParameters | None,
        measures: Measures | None,
        links: Callable[[], list[LinkSample]] | None,
    ) -> None:
        """proposals: None in a run of one. agreed: what holds before the first pass. prepared: checked in each pass.
        links: of the strategy, beside those of the channel."""
        self.channel = channel
        self.agreement = Agreement(proposals, agreed, lag=lag, deadline_s=session.collective_timeout_s)
        self._proposals, self._prepared = proposals, prepared
        self._measures, self._links = measures, links
        self._waited_s = self._stall_s = 0.0
        self._sent_bytes = 0  # before this step

    def begin_pass(self, opened: Pass, own: Agreed) -> None:
        """Propose what this rank knows. No other rank knows of a local pass. Raises BadInput for new parameters."""
        if self._prepared is not None:
            self._prepared.check()
        if opened.local:
            self.agreement.pass_alone()
        else:
            self.agreement.propose(opened.batch, own)

    def act(self) -> None:
        """Take up what all ranks proposed, and count the time that this rank waits for it."""
        self._waited_s += self.agreement.act()

    def agree(self, own: Agreed) -> Agreed:
        """Return what all ranks know alike by now. Call at a boundary."""
        self.act()
        if self.agreement.must_meet:
            self.agreement.meet(Meeting.UPDATE, own)  # sends no update before: that is a collective
        return self.agreement.reached(own)

    def check_alike(self) -> None:
        """Raise BadInput if a peer is known to be in another pass, or to have made other updates."""
        if self._proposals is not None:
            self._proposals.check()

    def take_waited(self, in_strategy_s: float) -> float:
        """Return the seconds waited for others since the last call, with those in the strategy."""
        waited_s, self._waited_s = self._waited_s + in_strategy_s, 0.0
        self._stall_s += waited_s
        return waited_s

    def take_metrics(self, sent_bytes: int) -> Mapping[str, float]:
        """Return the strategy's metrics of the step that ends. sent_bytes: outside of the channel, since the start."""
        stall_s, self._stall_s = self._stall_s, 0.0
        before, self._sent_bytes = self._sent_bytes, self.channel.sent_bytes() + sent_bytes
        return self._measures.take_step(stall_s, self._sent_bytes - before) if self._measures is not None else {}

    def statistics(self, sent_bytes: int) -> Mapping[str, float]:
        """Return what the strategy measured since the view began, for people."""
        if self._measures is None:
            return {}
        return {**self._measures.statistics(), "sent_bytes": float(self.channel.sent_bytes() + sent_bytes)}

    def links(self) -> list[LinkSample]:
        """Return what this rank's connections carried since the view began. May be called by any thread."""
        return [*self.channel.link_samples(), *(self._links() if self._links is not None else ())]
