"""The state of strategy stale-sparse for checkpoints in memory: of one round on every rank, though nobody waits for it.

At a boundary this rank has put everything into round n, and its masters cannot be newer: that takes its next part. So
masters, and moments that follow them, are asked for as of round n: the engine copies each tensor when the round has
come, or right before a later round changes it. What this rank has not sent after its part of round n is read at once.
Together they are one consistent cut: masters of round n, what every rank still owes, and nothing in flight between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

import torch

from atoll.agent.runtime.step.synchronisation import Bytes, Floats, Part
from atoll.errors import DeadlineExceeded, PeerLost
from atoll.kernels.exchange_engine import ExchangeEngine
from atoll.strategies.stale_sparse.layout import Layer
from atoll.strategies.stale_sparse.offload import Offload

Owing = Literal["live", "residual", "nothing"]
"""Where what a rank owes is: in its live weights, in residuals of the engine, nowhere."""

_LOOK_S: Final = 0.2  # how often a wait for others is broken off to see whether it is still wanted


class Rounds:
    """`keep` by the training thread; `read` and then `take` by one other, once for each `keep`."""

    def __init__(self, layers: Sequence[Layer], newest: Callable[[], int], deadline_s: float, owing: Owing) -> None:
        """newest: the round that this rank put everything into."""
        self._layers, self._newest, self._deadline_s, self._owing = layers, newest, deadline_s, owing
        self._number = 0
        self._owed: Mapping[str, Floats] = {}
        self._offload: Offload | None = None
        self._engine: ExchangeEngine

    def begin(self, engine: ExchangeEngine, offload: Offload | None) -> None:
        self._engine, self._offload = engine, offload

    @property
    def _tensors(self) -> list[int]:
        return [layer.number for layer in self._layers]

    @property
    def owes_moments(self) -> bool:
        return self._owing == "live"

    def shared(self) -> Mapping[str, torch.Tensor]:
        return {f"{kind}.{layer.name}": tensor for layer in self._layers for kind, tensor in _buffers(layer).items()}

    def parameters(self) -> Collection[int]:
        return {id(layer.parameter) for layer in self._layers}

    def owed(self) -> Mapping[str, int]:
        return {layer.name: layer.master.numel() for layer in self._layers} if self._owing != "nothing" else {}

    def keep(self, parts: Sequence[Part], owed: Mapping[str, Floats]) -> None:
        self._number, self._owed = self._newest(), owed
        if self._offload is not None:
            self._offload.drain(self._deadline_s)  # this rank's part of the round is still to be handed over
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
        for layer in self._layers:
            ranges: list[tuple[Bytes, Bytes]] = []
            for kind, tensor in _buffers(layer).items():
                wanted = by_name.get(f"{kind}.{layer.name}", [])
                ranges += [(tensor.view(torch.uint8).numpy()[one.begin : one.end], one.into) for one in wanted]
            self._engine.snapshot(self._number, layer.number, ranges)
        if self._owing == "residual":
            self._keep_owed(self._layers)
        elif self._owing == "live" and not all(layer.on_cpu for layer in self._layers):
            # Before a forward pass brings others' parts into weights that are not in the CPU's memory.
            self._engine.await_compressed(self._deadline_s)
            self._keep_owed([layer for layer in self._layers if not layer.on_cpu])

    def read(self) -> None:
        if self._owing == "live":
            self._engine.await_compressed(self._deadline_s)
            self._keep_owed([layer for layer in self._layers if layer.on_cpu])

    def take(self, stopped: Callable[[], bool]) -> bool:
        ends_s = time.monotonic() + self._deadline_s
        while True:
            try:
                self._engine.await_snapshot(self._tensors, self._number, _LOOK_S)
                return True
            except PeerLost:
                return False  # training is told by itself
            except DeadlineExceeded:
                if stopped():
                    return False
                if time.monotonic() > ends_s:
                    raise

    def settle(self) -> None:
        """On the training thread, when the newest round is there: what is kept is copied now, for masters are about to
        change otherwise than by a round. Raises PeerLost."""
        if self._number:
            self._engine.await_snapshot(self._tensors, self._number, self._deadline_s)

    def _keep_owed(self, layers: Sequence[Layer]) -> None:
        for layer in layers:
            live = None if self._owing == "residual" or layer.on_cpu else layer.live.cpu()
            self._engine.snapshot_residual(self._number, layer.number, live, self._owed[layer.name])


def _buffers(layer: Layer) -> dict[str, torch.Tensor]:
    """What updates of the masters write."""
    named = {"master": layer.master, "first": layer.first, "second": layer.second, "last_step": layer.last_step}
    return {kind: tensor for kind, tensor in named.items() if tensor is not None}
