"""Exchange of gradients: sparse parts with error feedback leave in the backward hooks, and a sparse optimizer applies
their sum to the masters. optimizer.step() only tells the rates; torch's own step finds no gradients and does nothing.

Source: StellaTrain (SIGCOMM '24), sections 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.agreement import Agreed
from atoll.agent.runtime.step.synchronisation import Callbacks, Norms, OwnState, Pass
from atoll.errors import BadInput
from atoll.kernels import scatter_blocks
from atoll.strategies.dense.gradients import refuse_second, refuse_sparse, squared_norm, total
from atoll.strategies.stale_sparse.layout import Layer, adopt_optimizer_state, flat_view, lay_out_for_gradients
from atoll.strategies.stale_sparse.optimizer_rules import Rates
from atoll.strategies.stale_sparse.rounds import Owing
from atoll.strategies.stale_sparse.settings import StaleSparse
from atoll.strategies.stale_sparse.taken import TakenGradient
from atoll.strategies.stale_sparse.worker import StaleSynchroniser


class GradientExchange(StaleSynchroniser):
    """A round is a pass: with gradient accumulation several rounds make one update."""

    finish_changes = False

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
        self._rates = Rates(optimizer)
        self._lazy = settings.momentum == "lazy"
        super().__init__(session, settings, model, optimizer, callbacks=callbacks, agreed=agreed)
        self._taken = [TakenGradient.like(layer.parameter) for layer in self._layers]
        self._resolved = 0  # rounds whose update was ordered, or carried over to the next
        self._weight, self._clip_norm, self._sampled = 0.0, 0.0, False
        self._local_sqnorms: list[torch.Tensor | float] = []
        self._came: set[int] = set()
        self._hooks += [
            layer.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, layer))  # type: ignore[no-untyped-call]
            for layer in self._layers
        ]

    def _lay_out(self) -> list[Layer]:
        return lay_out_for_gradients(self._model, self._optimizer, self._rates, lazy=self._lazy)

    def _adopt(self, saved: Mapping[str, torch.Tensor]) -> int:
        for layer in self._layers:
            if layer.last_step is not None and f"last_step.{layer.name}" in saved:
                layer.last_step.copy_(saved[f"last_step.{layer.name}"])
        return adopt_optimizer_state(self._layers, self._optimizer, self._rates)

    def _put_back(self, states: Sequence[OwnState]) -> None:
        if self._settings.error_feedback:
            for state in states:
                for layer in self._layers:
                    assert layer.residual is not None
                    layer.residual += state.owed[layer.name]

    def finish(self) -> None:
        """What is held back stays with the checkpoint; the masters are the same on every rank."""

    def close(self) -> None:
        self._clear_taken()
        super().close()

    # --- the pass

    def begin(self, opened: Pass) -> None:
        self._clear_taken()
        self._came.clear()
        self._local_sqnorms.clear()
        rehearsed = self._muted
        super().begin(opened)
        if self._muted:
            return
        if rehearsed:  # undoing that gave the optimizer a state of its own; it shall tell the layers' again
            adopt_optimizer_state(self._layers, self._optimizer, self._rates)
        if self._round > self._resolved:
            self._engine.accumulate(self._round)
            self._resolved = self._round
        self._round += 1
        self._weight, self._sampled = opened.batch_slice.weight, opened.sampled and opened.batch_slice.weight > 0

    def end(self) -> Norms:
        self.open = False
        if self._muted:
            return Norms()
        for layer in self._layers:
            if layer.number not in self._came:
                self._compress(layer, None)
        return Norms(total(self._local_sqnorms) if self._sampled else 0.0)

    def before_update(self) -> None:
        if self._round == self._resolved:
            return  # a second step() without a backward pass between has nothing to apply
        if self.open:
            raise BadInput("optimizer.step() in the middle of a backward pass; call it after run.backward(loss)")
        self._clear_taken()
        self._made += 1
        self._engine.apply(
            self._round,
            self._made,
            self._rates.rates(),
            maximize=self._rates.maximize,
            clip_norm=self._clip_norm,
        )
        self._clip_norm = 0.0
        self._resolved = self._round

    def after_update(self) -> None:
        """The engine makes the update."""

    def clip(self, max_norm: float) -> bool:
        self._clip_norm = max_norm
        return True

    def boundary(self, *, settle: bool) -> None:
        self._clear_taken()
        super().boundary(settle=settle)

    @property
    def _ordered(self) -> int:
        return self._resolved  # what waits for optimizer.step() is in nobody's weights

    # --- the state

    def masters(self) -> Mapping[int, torch.Tensor]:
        for layer in self._layers:
            if layer.rule in ("adam", "adamw"):
                self._optimizer.state[layer.parameter]["step"].fill_(float(self._made))
        return super().masters()

    def extra(self) -> Mapping[str, torch.Tensor]:
        times = {f"last_step.{layer.name}": layer.last_step for layer in self._layers if layer.last_step is not None}
        return {**super().extra(), **times}

    def _owing(self) -> Owing:
        return "residual" if self._settings.error_feedback else "nothing"

    def _held_back(self) -> Mapping[str, torch.Tensor]:
        return {layer.name: layer.residual for layer in self._layers if layer.residual is not None}

    def _publish(self, live: torch.Tensor, index: Any, values: Any) -> None:
        scatter_blocks(live, index, values)

    # --- gradients

    @torch.no_grad()
    def _on_gradient(self, layer: Layer, parameter: torch.Tensor) -> None:
        if not self.open:
            self._callbacks.begin()
        gradient = parameter.grad
        assert gradient is not None  # the hook runs after it was accumulated
        refuse_second(layer.name, layer.number in self._came)
        refuse_sparse(layer.name, gradient)
        self._came.add(layer.number)
        if self._muted:
            parameter.grad = None  # torch's own step comes next and finds nothing
            return
        parameter.grad = self._taken[layer.order]
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        flat = flat_view(gradient)
        assert flat is not None  # of the parameter's own layout
        if self._sampled:
            self._local_sqnorms.append(squared_norm(flat))
        self._callbacks.before_launch()
        if self._offload is None or layer.on_cpu:
            self._compress(layer, flat)
        else:
            self._offload.submit(layer.number, self._round, flat, self._later(layer))

    def _later(self, layer: Layer) -> Callable[[torch.Tensor], None]:
        number, weight, k_blocks = self._round, self._weight, self._k_blocks[layer.order]
        return lambda copied: self._engine.compress(number, layer.number, copied, weight, k_blocks)

    def _compress(self, layer: Layer, gradient: torch.Tensor | None) -> None:
        self._engine.compress(self._round, layer.number, gradient, self._weight, self._k_blocks[layer.order])

    def _clear_taken(self) -> None:
        for layer in self._layers:
            if type(layer.parameter.grad) is TakenGradient:
                layer.parameter.grad = None
