"""Exchange of gradients: sparse parts with error feedback leave in the backward hooks, and a sparse optimizer applies
their sum to the shared parameters. optimizer.step() only passes the hyperparameters: torch's own step finds no
gradients and does nothing.

Source: StellaTrain (SIGCOMM '24), sections 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from atoll.agent.runtime.data.sampler import Position
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.model.memory_order import flat_view
from atoll.agent.runtime.step.backward.gradient_passes import refuse_second, refuse_sparse
from atoll.agent.runtime.step.backward.local_passes import LocalPasses
from atoll.agent.runtime.strategy_interface.capabilities import Pass, WorkerContext
from atoll.errors import BadInput
from atoll.kernels.cuda_device import why_on_cpu
from atoll.strategies.shared_params.device_selection import DeviceSelector, SelectionRoom
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import ExchangeOptions
from atoll.strategies.shared_params.layout import Layer
from atoll.strategies.shared_params.local_update import PaceOf, SharedParamsUpdate
from atoll.strategies.stale_sparse.optimizer_rules import Rates, adopt_optimizer_state, lay_out_for_gradients
from atoll.strategies.stale_sparse.script_access import TakenGradient, WrittenWeights
from atoll.strategies.stale_sparse.settings import StaleSparse

ON_DEVICE: Final = frozenset({"float32", "float16", "bfloat16"})
"""Values of the wire with which blocks are chosen on the gradient's device."""


class GradientExchange(SharedParamsUpdate):
    """LocalUpdate that exchanges gradients.

    A sync round is a backward pass that is not local: without run.no_sync an accumulation has several. The sparse parts
    of others do not give the norm of the whole gradient. A flush does nothing: residuals stay with the checkpoint, and
    the shared parameters are the same on every rank."""

    flush_changes = False

    def __init__(self, context: WorkerContext, settings: StaleSparse, options: ExchangeOptions, pace: PaceOf) -> None:
        self._only = context.optimizers[0]
        self._rates = Rates(self._only)
        layers = lay_out_for_gradients(context.model, self._only, self._rates, lazy=settings.momentum == "lazy")
        tensors = [EngineTensor.of(layer) for layer in layers]
        super().__init__(context, options, pace, tensors, "engine" if settings.error_feedback else "none")
        self._selectors = self._on_devices()
        self._taken = [TakenGradient.like(layer.parameter) for layer in layers]
        self._written = WrittenWeights(layers)
        self._resolved = 0  # sync rounds whose update was ordered, or carried over to the next
        self._weight, self._clip_norm = 0.0, 0.0
        self._came: set[int] = set()
        self._local = False
        self._local_passes = LocalPasses([layer.parameter for layer in layers], self._opens)
        self._hooks = [
            layer.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, layer))  # type: ignore[no-untyped-call]
            for layer in layers
        ]

    def start(self, position: Position, share: float, origin: Origin | None) -> None:
        super().start(position, share, origin)
        self._written.renew()

    def _adopt_optimizer(self) -> int:
        return adopt_optimizer_state(self._layers, self._only, self._rates)

    def _adopt_residuals(self, states: Sequence[OwnState]) -> None:
        if self._options.error_feedback:
            for state in states:
                for layer in self._layers:
                    kept = layer.residual if layer.device_residual is None else layer.device_residual
                    assert kept is not None
                    kept += state.residual[layer.name].to(kept.device)

    def break_off(self) -> None:
        super().break_off()
        self._clear_taken()

    def close(self) -> None:
        self._clear_taken()
        self._local_passes.close()
        super().close()

    # --- the pass

    def expect_local(self) -> None:
        self._local_passes.expect()

    def begin(self, opened: Pass) -> None:
        self._clear_taken()
        self._came.clear()
        rehearsed = self._muted
        if rehearsed:  # which was undone
            self._written.renew()
        self._written.check()
        super().begin(opened)
        if self._muted:
            return
        self._weight, self._local = self._local_passes.begin(opened), opened.local
        if self._local:
            return
        if rehearsed:  # undoing that gave the optimizer a state of its own; it must be the layers' again
            adopt_optimizer_state(self._layers, self._only, self._rates)
        if self._round > self._resolved:
            self._exchange.gradients.accumulate(self._round)
            self._resolved = self._round
        self._round += 1

    def backward_done(self) -> None:
        super().backward_done()
        if not (self._muted or self._local):
            for layer in self._layers:
                if layer.number not in self._came:
                    self._send_earlier(layer)

    def before_update(self) -> None:
        if self._round == self._resolved:
            return  # a second step() without a backward pass between has nothing to apply
        if self._open:
            raise BadInput("optimizer.step() in the middle of a backward pass; call it after run.backward(loss)")
        self._clear_taken()
        self.state.updates += 1
        self._exchange.gradients.apply(
            self._round,
            self.state.updates,
            self._rates.rates(),
            maximize=self._rates.maximize,
            clip_norm=self._clip_norm,
        )
        self._clip_norm = 0.0
        self._resolved = self._round

    def clip(self, max_norm: float) -> bool:
        self._clip_norm = max_norm
        return True

    def boundary(self, *, wait: bool) -> None:
        self._clear_taken()
        if blocks := self.tally.take_bad_blocks():
            text = f"{blocks} blocks of 16 gradients were left out, for they were not finite"
            self._incidents.add(self.state.updates, text)
        super().boundary(wait=wait)
        if wait and not self._muted:
            self._written.compare()

    @property
    def _ordered(self) -> int:
        return self._resolved  # what waits for optimizer.step() is in no rank's weights

    # --- gradients

    def _opens(self) -> None:
        """Open the pass when a gradient comes: the script may have called loss.backward() itself."""
        if not self._open:
            self._events.open_pass()

    def _send_earlier(self, layer: Layer) -> None:
        """Send what local passes left, or nothing, for a layer without a gradient in this pass."""
        earlier = layer.parameter.grad
        if earlier is None and layer.order in self._selectors:
            self._choose_on_device(layer, None)
        elif earlier is None:
            self._compress(layer)(None)
        else:
            self._take(layer, earlier)

    @torch.no_grad()
    def _on_gradient(self, layer: Layer, parameter: torch.Tensor) -> None:
        self._opens()
        gradient = parameter.grad
        assert gradient is not None  # the hook runs after it was accumulated
        refuse_second(layer.name, layer.number in self._came)
        refuse_sparse(layer.name, gradient)
        self._came.add(layer.number)
        if self._muted:
            parameter.grad = None  # torch's own step comes next and finds nothing
        elif not self._local:
            self._take(layer, gradient)

    @torch.no_grad()
    def _take(self, layer: Layer, gradient: torch.Tensor) -> None:
        """Send the gradient and replace it in p.grad by a placeholder that raises."""
        parameter = layer.parameter
        parameter.grad = self._taken[layer.order]
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        flat = flat_view(gradient)
        assert flat is not None  # of the parameter's own layout
        self._events.gradients_leave()
        if layer.order in self._selectors:
            self._choose_on_device(layer, flat)
        elif self._exchange.on_cpu(layer):
            self._compress(layer)(flat)
        else:
            self._exchange.copy_from_gpu(layer, flat, self._compress(layer))

    def _choose_on_device(self, layer: Layer, gradient: torch.Tensor | None) -> None:
        engine, selector = self._exchange.gradients, self._selectors[layer.order]
        number, weight = self._round, self._weight
        k_blocks, seed = self._k_blocks[layer.order], engine.selection_seed(number, layer.number)

        def choose() -> None:
            engine.compress_chosen(number, layer.number, *selector.select(gradient, weight, k_blocks, seed))

        self._exchange.on_device(layer, choose)

    def _on_devices(self) -> dict[int, DeviceSelector]:
        """Return the selectors, by order, of layers whose blocks are chosen on their device.

        Whole gradients are copied to the CPU where values have fewer bits: the rounding error counts in the choice, and
        the CPU alone knows it. They are also copied where this build has no code for the device."""
        selectors, rooms = {}, dict[torch.device, SelectionRoom]()
        for layer in self._layers:
            device = layer.parameter.device
            if layer.on_cpu or self._options.values not in ON_DEVICE or why_on_cpu(device) is not None:
                continue
            entries, feedback = layer.shared_param.numel(), self._options.error_feedback
            room = rooms.setdefault(device, SelectionRoom(device))
            selector = DeviceSelector(entries, device, self._options.selection, room, error_feedback=feedback)
            layer.device_residual, selectors[layer.order] = selector.residual, selector
        return selectors

    def _compress(self, layer: Layer) -> Callable[[torch.Tensor | None], None]:
        """Return what hands a gradient of this round to the engine."""
        number, weight, k_blocks = self._round, self._weight, self._k_blocks[layer.order]
        return lambda gradient: self._exchange.gradients.compress(number, layer.number, gradient, weight, k_blocks)

    def _clear_taken(self) -> None:
        for layer in self._layers:
            if type(layer.parameter.grad) is TakenGradient:
                layer.parameter.grad = None
