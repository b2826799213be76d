"""Rolling state of strategies with shared parameters for checkpoints in memory.

It is of one sync round on every rank, though no rank waits for that round. At a boundary this rank has put everything
into round n. Its shared parameters cannot be newer: a newer round needs its next part. So shared parameters, and
moments that follow them, are requested as of round n. The engine copies each tensor when the round has come, or right
before a later round changes it. This rank's residuals after its part of round n are read at once.

Together they are one consistent cut: shared parameters of round n, every rank's residuals, aggregators' sums after
their totals of it, and nothing in flight between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

import numpy as np
import torch

from atoll.agent.runtime.model.durable import AGGREGATOR_SUM, Bytes, Floats, Part
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import LayerExchange
from atoll.strategies.shared_params.layout import Layer
from atoll.strategies.shared_params.second_moments import kept_bytes

ResidualPlace = Literal["live", "engine", "none"]
"""Place of a rank's residuals: in its live weights, in memory that the engine changes, nowhere."""

_LOOK_S: Final = 0.2  # interval at which a wait for others checks whether it was stopped


class RollingSharedParams:
    """A RollingState of shared parameters and the state that follows them."""

    def __init__(self, exchange: LayerExchange, newest: Callable[[], int], place: ResidualPlace) -> None:
        """newest: the sync round that this rank put everything into."""
        self._exchange, self._newest, self._place = exchange, newest, place
        self._layers, self._tensors = exchange.layers, exchange.tensors
        self._number = 0
        self._residuals: Mapping[str, Floats] = {}
        self._on_devices: dict[str, Floats] = {}  # device residuals as captured, until they are added

    @property
    def own_moments(self) -> bool:
        return self._place == "live"

    @property
    def beside_moments(self) -> int:
        return sum(kept_bytes(layer.parameter) for layer in self._layers) if self.own_moments else 0

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {f"{kind}.{layer.name}": tensor for layer in self._layers for kind, tensor in _buffers(layer).items()}

    def parameters(self) -> Collection[int]:
        return {id(layer.parameter) for layer in self._layers}

    def residuals(self) -> Mapping[str, int]:
        if self._place == "none" or not self._exchange.leads:
            return {}
        own = {layer.name: layer.shared_param.numel() for layer in self._layers}
        return own | {
            f"{AGGREGATOR_SUM}{layer.name}": layer.shared_param.numel()
            for layer in self._layers
            if layer.aggregator_sum is not None
        }

    def capture(self, parts: Sequence[Part], residuals: Mapping[str, Floats]) -> None:
        self._number, self._residuals = self._newest(), residuals
        self._exchange.await_copies()  # this rank's part of the round is still to be handed over
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
        for tensor in self._tensors:
            ranges = [one for layer in tensor.layers for one in _ranges(layer, by_name, residuals)]
            self._exchange.engine.snapshot(self._number, tensor.number, ranges)
        if self._place == "engine":
            for layer in self._layers:
                self._exchange.gradients.snapshot_residual(self._number, layer.number, residuals[layer.name])
            self._on_devices = {
                layer.name: self._exchange.copied(layer.device_residual).numpy()
                for layer in self._layers
                if layer.device_residual is not None
            }
        elif self._place == "live" and self._exchange.leads and not all(one.on_cpu for one in self._tensors):
            # Before a forward pass brings others' parts into weights that are not in the CPU's memory.
            self._exchange.engine.await_compressed(self._exchange.deadline_s)
            self._capture_residuals([one for one in self._tensors if not one.on_cpu])

    def read(self) -> None:
        if self._place == "live" and self._exchange.leads:
            self._exchange.engine.await_compressed(self._exchange.deadline_s)
            self._capture_residuals([one for one in self._tensors if one.on_cpu])

    def wait(self, stopped: Callable[[], bool]) -> bool:
        ends_s = time.monotonic() + self._exchange.deadline_s
        while True:
            try:
                self._await_snapshot(_LOOK_S)
                while self._on_devices:
                    name, kept = self._on_devices.popitem()
                    self._residuals[name][:] += kept
                return True
            except PeerLost:
                return False  # the training thread meets the loss by itself
            except DeadlineExceeded:
                if stopped():
                    return False
                if time.monotonic() > ends_s:
                    raise

    def finish_capture(self) -> None:
        """Copy what is captured now: shared parameters are about to change outside of a sync round. Raises PeerLost.

        Called on the training thread, when the newest round is there."""
        if self._number:
            self._await_snapshot(self._exchange.deadline_s)

    def _await_snapshot(self, deadline_s: float) -> None:
        self._exchange.engine.await_snapshot([one.number for one in self._tensors], self._number, deadline_s)

    def _capture_residuals(self, tensors: Sequence[EngineTensor]) -> None:
        """Capture the residuals that are in live weights."""
        for tensor in tensors:
            live = None if tensor.on_cpu else self._exchange.copied(tensor.live)
            alone = tensor.joined is None
            into = self._residuals[tensor.name] if alone else np.empty(tensor.shared_param.numel(), np.float32)
            self._exchange.updates.snapshot_residual(self._number, tensor.number, live, into)
            if not alone:
                for layer, part in tensor.parts(torch.from_numpy(into)):
                    self._residuals[layer.name][:] = part.numpy()


def _ranges(
    layer: Layer, wanted: Mapping[str, Sequence[Part]], residuals: Mapping[str, Floats]
) -> list[tuple[Bytes, Bytes]]:
    """Return the ranges of a layer to copy: source and destination of each. wanted: by name."""
    ranges: list[tuple[Bytes, Bytes]] = []
    for kind, tensor in _buffers(layer).items():
        content = tensor.view(torch.uint8).numpy()
        ranges += [(content[one.begin : one.end], one.into) for one in wanted.get(f"{kind}.{layer.name}", [])]
    if layer.aggregator_sum is not None:
        into = residuals[f"{AGGREGATOR_SUM}{layer.name}"].view(np.uint8)
        ranges.append((layer.aggregator_sum.view(torch.uint8).numpy(), into))
    return ranges


def _buffers(layer: Layer) -> dict[str, torch.Tensor]:
    """Return the memory that updates of the shared parameters write, by kind."""
    named = {
        "shared_param": layer.shared_param,
        "first": layer.first,
        "second": layer.second,
        "last_step": layer.last_step,
    }
    return {kind: tensor for kind, tensor in named.items() if tensor is not None}
