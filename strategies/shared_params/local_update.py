"""LocalUpdate of ranks with shared parameters: the common part of both kinds of exchange.

A sync round is one exchange between all ranks, numbered from 1 within a run. A layer's forward pre-hook waits until
round n - staleness is in its weights, and takes a newer one if it is there.

State of `SharedParamsUpdate`, one entry of a list per tensor:

| attribute            | type            | meaning                                    | written                       |
| -------------------- | --------------- | ------------------------------------------ | ----------------------------- |
| `_round`             | int             | n, the newest round with this rank's part  | updates: every update;        |
|                      |                 |                                            | gradients: `begin`            |
| `_share`             | float           | share of a whole batch, a replica's if any | `start`, `_begin_replica`;    |
|                      |                 |                                            | updates: at its first pass    |
| `_first_step`        | int             | steps before it are dry runs               | `start`                       |
| `_open`              | bool            | a backward pass is under way               | `begin`, `backward_done`      |
| `_muted`             | bool            | a dry run: nothing is exchanged            | `begin`                       |
| `_pace`              | ExchangePace    | density, turns and staleness in force      | `_set_pace`, at a new plan    |
| `_k_blocks`          | [int]           | blocks that this rank sends in a round     | `_set_pace`                   |
| `_aggregator_blocks` | [int]           | blocks that an aggregator returns          | `_set_pace`                   |
| `_replica`           | Replica or None | the island, where it has several workers   | `start`                       |
| `_linger_s`          | float           | seconds that `close` waits for messages    | LINGER_S; 0 after `break_off` |

Equations. B blocks of a tensor; `ordered`: the newest round whose update was ordered, n where updates are exchanged.

    required          = max(0, min(n - staleness, ordered))      the round that the next forward pass waits for
    k_blocks          = max(1, round(sent * B)) if sent < 1 else B
    aggregator_blocks = max(1, round(returned * B)) if returned < 1 else B"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from atoll.agent.runtime.channel.channel import LINGER_S
from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.as_one import as_one
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.session.kernel_notice import announce_cpu_kernels
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.strategy_interface.capabilities import LocalUpdate, Pass, WorkerContext
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import ExchangeOptions, ExchangePace, LayerExchange
from atoll.strategies.shared_params.finite_updates import Incidents
from atoll.strategies.shared_params.forward_weights import ForwardWeights
from atoll.strategies.shared_params.live_weights import LiveWeights
from atoll.strategies.shared_params.measures import Tally
from atoll.strategies.shared_params.replica import Replica, ReplicaWeights
from atoll.strategies.shared_params.rolling import ResidualPlace
from atoll.strategies.shared_params.state import SharedParamsState
from atoll.v1.common_pb2 import LEVEL_WARNING

PaceOf: TypeAlias = Callable[[PlanParameters | None], ExchangePace]
"""Pace under a plan's parameters; None: under the settings alone."""


class SharedParamsUpdate(LocalUpdate, ABC):
    """Base of both kinds of exchange. All methods run on the training thread."""

    def __init__(
        self,
        context: WorkerContext,
        options: ExchangeOptions,
        pace: PaceOf,
        tensors: Sequence[EngineTensor],
        place: ResidualPlace,
    ) -> None:
        """pace: the exchange's pace under a plan's parameters. place: where this rank's residuals are."""
        self._events, self._channel = context.events, context.channel
        self._session, self._optimizer = context.session, as_one(context.optimizers)
        self._model, self._options, self._pace_of = context.model, options, pace
        self._incidents = Incidents(context.session.place.rank, context.events.non_finite)
        self._replica: Replica | None = None  # this rank's island, where it has mates and each step is exact
        self._round = 0  # sync rounds that this rank put everything into
        self._first_step = 0
        self._share = 1.0  # of this rank, of a whole batch
        self._open = self._muted = False  # muted: a dry run, of which nothing is exchanged
        for device in {tensor.live.device for tensor in tensors}:
            announce_cpu_kernels(context.session, device)
        self._exchange = LayerExchange(tensors, context.session.collective_timeout_s)
        self._tensors, self._layers = tensors, self._exchange.layers
        shared = 0 if context.session.device.type == "cuda" else max(1, torch.get_num_threads())
        self.tally = Tally(self._take_counts, shared)
        self.state = SharedParamsState(context.session, self._exchange, self._optimizer, place, lambda: self._ordered)
        self._forward = ForwardWeights(self._exchange)
        self._weights: LiveWeights | ReplicaWeights = LiveWeights(
            context.model,
            self._exchange,
            self.tally,
            self._forward,
            additive=options.exchange == "updates",
            required=lambda: self._required,
            lost=context.events.lost,
        )
        self._k_blocks: list[int] = []
        self._aggregator_blocks: list[int] = []
        self._pace = pace(None)
        self._set_pace(self._pace)
        self._hooks: list[Any] = []
        self._linger_s = LINGER_S

    # --- what the kinds of exchange differ in

    def _adopt_optimizer(self) -> int:
        """Restore the optimizer's state; shared parameters are set. Returns how many updates were made before."""
        return 0

    @abstractmethod
    def _adopt_residuals(self, states: Sequence[OwnState]) -> None:
        """Restore the residuals of the previous run that this rank took over, before the first sync round."""

    def _aggregators_before(self, states: Sequence[OwnState], islands: Sequence[Sequence[int]]) -> Sequence[int | None]:
        """Return the island that has each tensor's sum in `states` of the previous run. Collective.

        Empty: no island has any."""
        return ()

    # --- the run

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        shared: Mapping[str, torch.Tensor] = origin.shared if origin is not None else {}
        self._first_step, self._share = position.step, share
        self.state.take_over_shared_params(shared)
        self.state.updates = max(self._adopt_optimizer(), int(shared.get("updates", 0)))
        islands = self._channel.islands()
        resumed = origin if "versions" in shared else None
        states = self.state.take_over_residuals(resumed) if resumed is not None else []
        self._exchange.start(
            self._session, self._options, islands, self._pace, self._aggregators_before(states, islands)
        )
        self.tally.every = self._pace.every
        self.tally.islands = len(islands)
        if len(islands) == 1 and self._options.aggregators:
            _warn_alone(self._session)
        if self._options.aggregators:
            self._replica = Replica.of(self._session, islands, self._model, self._events)
        if self._replica is not None:
            self._begin_replica(self._replica)
        self._adopt_residuals(states)
        self.state.adopted = True
        self._channel.connect(self._exchange.engine, [tensor.name for tensor in self._tensors])

    def _begin_replica(self, replica: Replica) -> None:
        """Replace the hooks of a rank that is alone in its island by those of a replica. Collective."""
        self._unhook()
        assert isinstance(self._weights, LiveWeights)
        self._weights = ReplicaWeights(self._weights, self._exchange, replica, self._forward, lambda: self._required)
        self._share = replica.sum_share(self._share)

    def break_off(self) -> None:
        self._linger_s = 0.0  # no peer can use what waits to be sent
        self._unhook()
        if self._replica is not None:
            self._replica.gradients.break_off()

    def close(self) -> None:
        self._unhook()
        if self._replica is not None:
            self._replica.gradients.close()
        self._exchange.close(before_engine=partial(self._channel.close, linger_s=self._linger_s))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._weights.close()
        self._forward.release()

    # --- the pass and the boundary

    def begin(self, opened: Pass) -> None:
        self._muted = opened.muted or opened.batch.step < self._first_step
        self._open = True
        if not self._muted:
            self._set_pace(self._pace_of(opened.params))
            self._weights.backward_begins()

    def backward_done(self) -> None:
        self._open = False

    def boundary(self, *, wait: bool) -> None:
        self._forward.release()
        self._channel.compare(self._exchange.engine.digests())
        self._channel.deliver_up_to(self._ordered if wait else self._required)
        self._weights.boundary(wait_for=self._ordered if wait else None)

    def show_shared(self) -> None:
        taken = self._forward.taken
        self.boundary(wait=True)
        if self._replica is not None:
            taken = self._forward.taken  # at the boundary, of all the island's workers
        self._forward.show(self._tensors, taken)

    def show_own(self) -> None:
        self._forward.hide()

    def waited(self) -> float:
        return self.tally.take_waited()

    @property
    def _ordered(self) -> int:
        """Return the newest sync round whose update was ordered."""
        return self._round

    @property
    def _required(self) -> int:
        """Return the sync round that the next forward must have (StellaTrain, section 3.3: never older)."""
        return max(0, min(self._round - self._pace.staleness, self._ordered))

    def _set_pace(self, pace: ExchangePace) -> None:
        """Change the pace between two sync rounds, on all ranks alike. Rounds under way finish as they began."""
        if pace == self._pace and self._k_blocks:
            return
        self._pace, self.tally.sparsity = pace, pace.sparsity
        self._forward.at_shared_params = pace.at_shared_params
        self.lag = self.state.staleness = pace.staleness
        self._k_blocks = [tensor.k_blocks(pace.sent) for tensor in self._tensors]
        self._aggregator_blocks = [tensor.k_blocks(pace.returned) for tensor in self._tensors]
        if self._exchange.started:
            self._exchange.change_pace(self._round + 1, pace)
            self.tally.every = self._exchange.every

    def _take_counts(self) -> Mapping[str, float]:
        return self._exchange.engine.take_stats()._asdict()


def _warn_alone(session: Session) -> None:
    """Warn about a single island, once in a run. Every sync round has all islands, so it is true of each round."""
    if session.place.is_main and session.link is not None:
        text = (
            f"all {session.place.world_size} workers of this run are in one island: sync rounds exchange with no other "
            "island, and compression only costs accuracy. On one island use strategy dense"
        )
        session.notice(LEVEL_WARNING, text)
