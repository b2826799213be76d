"""Exchange of updates: each rank's own optimizer moves its own weights at once and in full; what it is ahead of the
masters leaves in sparse parts, and what the others did is added when it comes.

With N ranks, live = master - N * owed at any time, where owed is what this rank has not sent yet: error feedback is in
the weights themselves. A rank therefore sees the effect of its own gradients without delay, however little is sent and
however thin the link is, which is what large learning rates need. Gradients are weighted with N * b_i / B before the
optimizer, and the masters take each rank's update at 1 / N: an optimizer that is linear in the gradient (SGD with or
without momentum) makes the very update of the whole batch when everything is sent; Adam makes the mean of the ranks'
own.

Ours; related: EF-SGD (Karimireddy et al., 2019), CHOCO-SGD (Koloskova et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.synchronisation import Callbacks, Norms, OwnState, Pass
from atoll.agent.runtime.transport.process_groups import collective
from atoll.errors import BadInput
from atoll.strategies.dense.gradients import refuse_sparse, squared_norm, total
from atoll.strategies.stale_sparse.layout import Layer, lay_out_for_updates
from atoll.strategies.stale_sparse.publication import add_blocks
from atoll.strategies.stale_sparse.rounds import Owing
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.worker import StaleSynchroniser


class UpdateExchange(StaleSynchroniser):
    """A round is an update. Any of torch's optimizers, gradient clipping and scalers work as they do alone."""

    finish_changes = True

    def __init__(
        self,
        session: Session,
        settings: StaleSparse,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        callbacks: Callbacks,
        agreed: Agreed,
    ) -> None:
        """Raises BadInput for what cannot be trained so."""
        super().__init__(session, settings, model, optimizer, callbacks=callbacks, agreed=agreed)
        self._factor = 1.0  # of this pass's gradients
        self._sampled = False
        self._hooks += [layer.parameter.register_hook(partial(self._weighted, layer)) for layer in self._layers]  # type: ignore[no-untyped-call]

    def _lay_out(self) -> list[Layer]:
        return lay_out_for_updates(self._model, self._optimizer)

    def _adopt(self, saved: Mapping[str, torch.Tensor]) -> int:
        return 0

    @torch.no_grad()
    def _put_back(self, states: Sequence[OwnState]) -> None:
        for state in states:
            for layer in self._layers:
                owed = state.owed[layer.name].to(device=layer.live.device)
                layer.live.sub_(owed, alpha=float(self._world_size))
            if state.rank == self._session.place.rank and state.optimizer is not None:
                self._optimizer.load_state_dict(dict(state.optimizer))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is still owed, all of it: the model that is left is the same on every rank."""
        self._rounds.settle()
        group = self._session.group
        for layer in self._layers:
            given = self._owed(layer)
            together = given.clone()
            if group is not None:
                with collective("sending what compression held back"):
                    dist.all_reduce(together, group=group.control)
            with self._flushing:
                self._given[layer.name] = given
                self._flushes[layer.name] += 1
                layer.master -= together
                layer.live.copy_(layer.master)
        if group is not None:
            group.barrier()  # now nobody can go on from a state without it
        self._given.clear()

    # --- the pass

    def begin(self, opened: Pass) -> None:
        super().begin(opened)
        self._factor = self._world_size * opened.batch_slice.weight
        self._sampled = opened.sampled and self._factor > 0

    def end(self) -> Norms:
        self.open = False
        if not self._sampled:
            return Norms()
        gradients = [layer.parameter.grad for layer in self._layers]
        norm = total([squared_norm(one) for one in gradients if one is not None])
        return Norms(norm / self._factor**2)

    def before_update(self) -> None:
        if self.open:
            raise BadInput("optimizer.step() in the middle of a backward pass; call it after run.backward(loss)")
        if self._offload is not None:
            self._offload.drain(self._deadline_s)
        self._engine.await_compressed(self._deadline_s)

    def after_update(self) -> None:
        self._round += 1
        self._made += 1
        self._engine.sum_updates(self._round, self._k_blocks)
        for layer in self._layers:
            if self._offload is not None and not layer.on_cpu:
                self._offload.submit(layer.number, self._round, layer.live, self._later(layer))

    def clip(self, max_norm: float) -> bool:
        return False  # torch's own, of this rank's gradient

    # --- the state

    def _owing(self) -> Owing:
        return "live"

    def _held_back(self) -> Mapping[str, torch.Tensor]:
        return {layer.name: self._owed(layer) for layer in self._layers}

    def _own_optimizer_state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._optimizer.state_dict()
        return state

    def _owed(self, layer: Layer) -> torch.Tensor:
        owed = torch.empty_like(layer.master)
        self._engine.read_residual(layer.number, None if layer.on_cpu else layer.live.cpu(), owed)
        return owed

    def _publish(self, live: torch.Tensor, index: Any, values: Any) -> None:
        add_blocks(live, index, values)

    def _weighted(self, layer: Layer, gradient: torch.Tensor) -> torch.Tensor | None:
        if not self.open:
            self._callbacks.begin()
        refuse_sparse(layer.name, gradient)
        if self._muted or self._factor == 1.0:
            return None
        return gradient * self._factor if self._factor > 0 else torch.zeros_like(gradient)  # 0 * NaN would be NaN

    def _later(self, layer: Layer) -> Callable[[torch.Tensor], None]:
        number, k_blocks = self._round, self._k_blocks[layer.order]
        return lambda copied: self._engine.compress_live(number, layer.number, copied, k_blocks)

    def _take_changes(self, layers: Sequence[Layer], number: int) -> None:
        if self._offload is not None:
            # A copy that was taken before the others' part is in the weights must be compared before it is.
            self._offload.drain(self._deadline_s)
            self._engine.await_compressed(self._deadline_s)
        super()._take_changes(layers, number)
