"""Exchange of updates between ranks whose own optimizers move their own weights at once and in full.

Each rank sends its difference from the shared parameters in sparse parts. It adds the other ranks' updates when they
come. The shared parameters take each rank's update times its share b_i / B of a whole batch. So at any time

    live = shared_param - residual / share

where the residual is what this rank has not sent yet: error feedback is in the weights themselves. A rank sees the
effect of its own gradients without delay, however little is sent and however thin the link is. Large learning rates
need that. An optimizer that is linear in the gradient (SGD with or without momentum) makes exactly the update of the
whole batch when everything is sent. Adam makes the weighted mean of the ranks' own updates, each divided by the root
of the whole batch's second moment (second_moments.py).

Shares come from the plan and are valid for many steps. A batch may be split otherwise, as an epoch's last is. Then the
rank's gradient is weighted by the deviation: share * (weight / share) is b_i / B in every step, and momentum is that of
the whole batch. Where a plan changes shares, moments and residuals count by the new ones.

Ours; related: EF-SGD (Karimireddy et al., 2019), CHOCO-SGD (Koloskova et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from atoll.agent.runtime.data.sampler import BatchSlice, Position
from atoll.agent.runtime.model.as_one import load_state
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.step.backward.gradient_passes import refuse_sparse
from atoll.agent.runtime.strategy_interface.capabilities import Norms, Pass, WorkerContext
from atoll.agent.runtime.transport.process_groups import gathered_rows
from atoll.errors import BadInput
from atoll.strategies.shared_params.engine_tensors import MIN_TENSORS_PER_AGGREGATOR, EngineTensor, joined
from atoll.strategies.shared_params.exchange import ExchangeOptions
from atoll.strategies.shared_params.finite_updates import FiniteUpdates, reset_state_not_finite
from atoll.strategies.shared_params.layout import Layer, lay_out_for_updates, trained
from atoll.strategies.shared_params.local_fit_gap import LocalFitGap
from atoll.strategies.shared_params.local_update import PaceOf, SharedParamsUpdate
from atoll.strategies.shared_params.second_moments import MomentSync, SecondMoments


class UpdateExchange(SharedParamsUpdate):
    """LocalUpdate that exchanges updates. A sync round has what all optimizers did in a batch.

    Any of torch's optimizers, several too, gradient clipping and scalers work as in single-rank training."""

    def __init__(self, context: WorkerContext, options: ExchangeOptions, pace: PaceOf) -> None:
        """Raises BadInput for what cannot be trained so."""
        session = context.session
        aggregators = session.place.world_size if options.aggregators else 1  # at most
        layers = lay_out_for_updates(context.model)
        tensors = joined(context.model, layers, MIN_TENSORS_PER_AGGREGATOR * aggregators * pace(None).every)
        super().__init__(context, options, pace, tensors, "live")
        self._factor = 1.0  # of this pass's gradients
        self._sent_share = 1.0  # of the newest sync round
        # Before every other hook of an update, which may take its gradients into moments.
        self._finite = FiniteUpdates(context.optimizers, self._leave_out)
        self._advantage = LocalFitGap(self._exchange)
        self._counts = False  # the pass that is open, or the last
        self._accumulated = False  # a pass since the last update
        self._updated = False  # since the last sync round
        self._passed = False  # since the last boundary
        self._hooks = [layer.parameter.register_hook(partial(self._on_gradient, layer)) for layer in self._layers]  # type: ignore[no-untyped-call]
        self._optimizers = context.optimizers
        self._moments: SecondMoments | None = None
        self._told: MomentSync | None = None
        self._holders: Mapping[str, Sequence[int]] = {}  # ranks that had sums, by layer, as this began
        self._is_as_before = False  # its optimizer's state is what a rank of this number had

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        super().start(position, share, origin)
        self._sent_share = self._share
        self._moments = moments = SecondMoments(self._optimizers, [one for _, one in trained(self._model)])
        alone = [[rank] for rank in range(self._session.place.world_size)]
        islands = self._channel.islands() if self._options.aggregators else alone
        if len(islands) == 1:
            moments.forget()
        elif self._session.group is not None and len(moments):
            self._told = MomentSync(moments, self._session.group, leads=self._exchange.leads)
            self.state.telling = self._begin_telling(self._told, islands, origin)

    def _begin_telling(
        self, told: MomentSync, islands: Sequence[Sequence[int]], origin: Origin | None
    ) -> Sequence[int]:
        """Return the update of the job after which these islands began to sum moments, and the island of each rank."""
        island_of = {rank: number for number, ranks in enumerate(islands) for rank in ranks}
        placed = [island_of[rank] for rank in sorted(island_of)]
        begun, *placed_then = origin.shared["telling"].tolist() if origin and "telling" in origin.shared else [0]
        told.begin(self.state.updates, begun if self._is_as_before and placed_then == placed else None)
        return told.begun, *placed

    @torch.no_grad()
    def _adopt_residuals(self, states: Sequence[OwnState]) -> None:
        self._adopt_sums(states)
        self._is_as_before = any(state.rank == self._session.place.rank for state in states)
        held = [state.residual for state in states if state.residual]
        found = bool(held) if self._replica is None else self._replica.any(bool(held))
        for tensor in self._tensors:
            residual = torch.zeros_like(tensor.shared_param) if found else None
            if residual is not None:
                for layer, part in tensor.parts(residual):
                    part.copy_(sum((one[layer.name] for one in held), torch.zeros_like(part)))
                if self._replica is not None:
                    self._replica.sum(residual)  # one rank of the island restored it
            self._exchange.set_live(tensor, residual, self._share)
        for state in states:
            if state.rank == self._session.place.rank and state.optimizer is not None:
                load_state(self._optimizer, dict(state.optimizer))
        if self._replica is not None:
            self._replica.level_optimizer(self._optimizer)
            self._replica.level([tensor.live for tensor in self._tensors])

    def _aggregators_before(self, states: Sequence[OwnState], islands: Sequence[Sequence[int]]) -> Sequence[int | None]:
        found = {name for state in states for name in state.aggregator_sums}
        mine = [int(layer.name in found) for layer in self._layers]
        rows = gathered_rows(self._session.group, mine)
        self._holders = {
            layer.name: [rank for rank, row in enumerate(rows) if row[number]]
            for number, layer in enumerate(self._layers)
        }
        island_of = {ranks[0]: number for number, ranks in enumerate(islands)}
        holders = [{rank for layer in one.layers for rank in self._holders[layer.name]} for one in self._tensors]
        return [island_of.get(min(ranks)) if len(ranks) == 1 else None for ranks in holders]

    def _adopt_sums(self, states: Sequence[OwnState]) -> None:
        """Restore an aggregator's sums of the previous run where it still aggregates the layer.

        Elsewhere the shared parameters take the sum in full."""
        found = {name: one for state in states for name, one in state.aggregator_sums.items()}
        group = self._session.group
        for tensor in self._tensors:
            for layer in tensor.layers:
                holders = self._holders.get(layer.name, [])
                if holders == [tensor.aggregator]:
                    if layer.aggregator_sum is not None:
                        layer.aggregator_sum.copy_(found[layer.name])
                elif holders:  # the sum of a lost aggregator is nowhere, and nothing crosses the link
                    together = found.get(layer.name, torch.zeros_like(layer.shared_param)).clone()
                    if group is not None:
                        group.sum_in_place(together, "handing over what aggregators summed")
                    layer.shared_param -= together

    @torch.no_grad()
    def flush(self) -> None:
        """Send all residuals and the aggregators' sums in full. The model is then the same on every rank."""
        self._forward.release()
        self.state.rolling().finish_capture()
        group, flushes = self._session.group, self.state.flushes
        kept = [int(self._keeps_something(tensor)) for tensor in self._tensors]
        by_rank = zip(*gathered_rows(group, kept), strict=True)
        for tensor in [one for one, said in zip(self._tensors, by_rank, strict=True) if any(said)]:
            given = self._exchange.read_residual(tensor)
            if tensor.aggregator_sum is not None:
                given += tensor.aggregator_sum
            alone = self._options.aggregators and self.tally.islands == 1  # one replica
            together = given.clone()
            if group is not None and not alone:
                group.sum_in_place(together, "sending residuals")
            with flushes.flushing({layer.name: part for layer, part in tensor.parts(given)}):
                if alone:  # its workers have the same weights: the shared parameter takes their bits
                    tensor.shared_param.copy_(tensor.live)
                else:
                    tensor.shared_param -= together
                if tensor.aggregator_sum is not None:
                    tensor.aggregator_sum.zero_()
                self._exchange.set_live(tensor, None, self._share)
        if self._replica is not None:
            self._replica.level([tensor.live for tensor in self._tensors])
        if group is not None:
            group.barrier()  # no rank can resume from a state without it now
        flushes.everywhere()

    def _keeps_something(self, tensor: EngineTensor) -> bool:
        """Return True if this rank has something of the tensor to send."""
        summed = tensor.aggregator_sum is not None and bool(tensor.aggregator_sum.any())
        return summed or bool(self._exchange.read_residual(tensor).any())

    # --- the pass

    def _unhook(self) -> None:
        super()._unhook()
        if self._moments is not None:
            self._moments.mute()

    def close(self) -> None:
        super().close()
        self._finite.close()
        if self._moments is not None:
            self._moments.close()

    def expect_local(self) -> None:
        """Expect a local pass. It is as any other for a rank alone in its island: only its updates leave."""
        if self._replica is not None:
            self._replica.gradients.expect_local()

    def begin(self, opened: Pass) -> None:
        super().begin(opened)
        if not self._muted:
            self._advantage.passes(opened.loss, first=not self._accumulated)
        self._counts = not self._muted and not opened.local
        if not self._muted and not self._accumulated:  # an accumulated update takes its first pass's share
            self._share, self._accumulated = self._share_of(opened.batch), True
        self._factor = opened.batch.weight / self._share
        if self._replica is not None:
            self._replica.gradients.begin(self._replica.opened(opened, self._share))

    def backward_done(self) -> None:
        super().backward_done()
        if self._replica is not None:
            self._replica.gradients.backward_done()

    def combined(self) -> Norms:
        self._passed = True
        if self._replica is not None:
            self._replica.gradients.combined()
        if self._pace.at_shared_params:
            self.tally.advantage = 0.0
        elif self._counts and self._advantage.is_due(self._round):
            self._advantage.measure(self._factor if self._replica is None else 1.0)
            self.tally.advantage = self._advantage.value
        return super().combined()

    def waited(self) -> float:
        waited_s = super().waited()
        return waited_s + (self._replica.gradients.waited() if self._replica is not None else 0.0)

    def before_update(self) -> None:
        if self._open:
            raise BadInput("optimizer.step() in the middle of a backward pass; call it after run.backward(loss)")
        self._exchange.await_selected()
        self._forward.check_unwritten()
        self._forward.release()

    def after_update(self) -> None:
        self._updated = True

    def send_update(self) -> None:
        if self._updated and self._replica is not None:
            self.boundary(wait=False)  # all of the island's workers level their weights there
        elif self._updated:
            self._put_in()

    def boundary(self, *, wait: bool) -> None:
        if self._has_bad_weights():
            self._take_shared_weights()
        if self._updated:
            self._put_in()
        super().boundary(wait=wait)

    def _leave_out(self, text: str) -> None:
        """Record an update whose gradients are not finite, on all workers of the island alike. Raises NotFinite."""
        if not self._muted:
            self._incidents.add(self.state.updates + 1, text)

    def _has_bad_weights(self) -> bool:
        """Return True if the exchange met weights that are not finite. Collective in the island.

        It waits only after a pass and its update: a worker whose script left out one of them must not wait here for
        others that wait in a pass."""
        if self._replica is None:
            return self.tally.take_bad_blocks() > 0
        trained, self._passed = self._updated and self._passed, False
        return trained and self._replica.any(self.tally.take_bad_blocks() > 0)

    @torch.no_grad()
    def _take_shared_weights(self) -> None:
        """Replace own weights that are not finite by the shared parameters, and reset the optimizer's state of them.

        Collective in the island; raises PeerLost, NotFinite."""
        self._forward.release()
        self._exchange.await_selected()
        self._weights.boundary(wait_for=self._round)  # nothing of this worker is on its way any more
        bad = [one for one in self._tensors if not bool(one.live.isfinite().all())]
        for tensor in bad:
            residual = self._exchange.read_residual(tensor)  # 0 where it is not finite
            self._exchange.set_live(tensor, residual, self._sent_share)
        if self._replica is not None:
            self._replica.level([tensor.live for tensor in self._tensors])
        anew = reset_state_not_finite(self._optimizers)
        self._incidents.add(
            self.state.updates,
            f"weights were not finite in {', '.join(one.name for one in bad[:3]) or 'no tensor any more'}"
            f"{f' and {len(bad) - 3} more' if len(bad) > 3 else ''} and took the shared values again; the optimizer's "
            f"state of {anew} parameters begins anew",
        )

    def _put_in(self) -> None:
        """Put all that the optimizers did since the last sync round into the next."""
        self._updated = False
        self._round += 1
        self.state.updates += 1
        self._accumulated = False
        if self._told is not None:
            self._told.updated(self.state.updates, self._share, self._pace.staleness)
        self._sent_share = self._share
        self._exchange.updates.sum_updates(self._round, self._share, self._k_blocks, self._aggregator_blocks)
        for tensor in self._tensors:
            if not self._exchange.on_cpu(tensor) and self._exchange.is_due(tensor, self._round):
                self._exchange.send_live(tensor, self._round, self._share, self._k_blocks[tensor.number])

    def _on_gradient(self, layer: Layer, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient as this rank's optimizer takes it."""
        if not self._open:
            self._events.open_pass()
        refuse_sparse(layer.name, gradient)
        if self._muted or self._factor == 1.0:
            return None
        return gradient * self._factor if self._factor > 0 else torch.zeros_like(gradient)  # 0 * NaN would be NaN

    def _share_of(self, batch: BatchSlice) -> float:
        """Return this rank's share of a whole batch, or its island's where that is a replica."""
        return batch.share if self._replica is None else self._replica.share(batch.shares)
