"""Refuse weights that the script writes itself, where the shared parameters alone are true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from atoll.errors import BadInput
from atoll.strategies.shared_params.layout import Layer


class WrittenWeights:
    """Detection of parameters that the script wrote, not the exchange.

    The exchange writes the memory of a parameter without counting up its version, which operations of torch do. Writes
    through `parameter.data` do not either: they are found once all updates are in the weights."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._versions: list[int] = []
        self.renew()

    def renew(self) -> None:
        """Treat the parameters as unwritten in their present state."""
        self._versions = [layer.parameter._version for layer in self._layers]

    def check(self) -> None:
        """Raise BadInput for a parameter whose version is another than at `renew`."""
        for layer, version in zip(self._layers, self._versions, strict=True):
            if layer.parameter._version != version:
                _refuse(layer)

    @torch.no_grad()
    def compare(self) -> None:
        """Raise BadInput for a parameter that differs from the shared one, when all updates are in it."""
        for layer in self._layers:
            live = layer.live.cpu()
            if not torch.equal(layer.shared_param.to(live.dtype), live):
                _refuse(layer, ", or a bit of this worker's memory changed")


def _refuse(layer: Layer, otherwise: str = "") -> NoReturn:
    raise BadInput(
        f'the script wrote parameter {layer.name} after run.prepare{otherwise}. With exchange = "gradients" sparse '
        "optimizers update the shared parameters, which never take over what is written to a worker's copy. Use "
        'exchange = "updates" or another strategy, or write to it before run.prepare'
    )
