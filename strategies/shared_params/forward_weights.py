"""Passes at the shared parameters: parameters hold the shared model's values in forward and backward passes, and their
own, which are ahead of it, while the optimizer updates them and others' updates come in.

A gradient at own weights has this rank's own updates in it at once, others' only when they come. Where what a rank
learns of its own data is what the others' data take back, its own weights are soon good for its data alone, and their
gradients tell the shared model next to nothing. Those at the shared parameters are late by what is not sent yet, and
are of the model that is learnt (error feedback: EF-SGD, Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.errors import BadInput
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import LayerExchange


class ForwardWeights:
    """Used on the training thread alone. `at_shared_params` may change between two steps."""

    def __init__(self, exchange: LayerExchange) -> None:
        self._exchange = exchange
        self.at_shared_params = False
        self._values: dict[int, torch.Tensor] = {}  # [N] by tensor, as its live weights
        self._taken: dict[int, EngineTensor] = {}
        self._versions: dict[int, int] = {}  # of parameters with the shared parameters' values, by id
        self._taken_before: list[EngineTensor] = []  # `show`

    @property
    def taken(self) -> list[EngineTensor]:
        """Tensors whose parameters have the shared values now."""
        return list(self._taken.values())

    def show(self, tensors: Sequence[EngineTensor], before: Sequence[EngineTensor]) -> None:
        """Give the parameters of all these the shared values as they are now, until `hide`. before: what was `taken`
        by a pass that is under way, which has the shared values until `release`."""
        self.release()
        self._taken_before = list(before)
        self._take(tensors)

    def hide(self) -> None:
        """After `show`: give the parameters back what they had."""
        self.release()
        if not self.at_shared_params:
            self._values.clear()  # as large as the model
        self._take(self._taken_before)

    def take(self, tensors: Sequence[EngineTensor]) -> list[torch.Tensor]:
        """Before a forward pass: the parameters of these get the shared parameters' values, until `release`. Returns
        those of the ones that had not, [N] each; none where passes are at own weights."""
        if not self.at_shared_params:
            return []
        new = [one for one in tensors if one.number not in self._taken]
        self._take(new)
        return [self._values[one.number] for one in new]

    def check_unwritten(self) -> None:
        """Raises BadInput for a parameter that the script wrote while it had the shared parameters' values: `release`
        drops them."""
        for layer in (layer for tensor in self._taken.values() for layer in tensor.layers):
            if layer.parameter._version != self._versions[id(layer.parameter)]:
                raise BadInput(
                    f"the script wrote parameter {layer.name} between its forward pass and optimizer.step(), where it "
                    'holds the shared values (gradients = "shared_params"). Write to it after optimizer.step()'
                )

    def release(self) -> None:
        """All parameters have their own values again."""
        for tensor in self._taken.values():
            for layer in tensor.layers:
                assert layer.aside is not None
                layer.parameter.data, layer.aside = layer.aside, None
        self._taken.clear()

    def _take(self, tensors: Sequence[EngineTensor]) -> None:
        for tensor in tensors:
            self._put_in(tensor)
            self._taken[tensor.number] = tensor

    def _put_in(self, tensor: EngineTensor) -> None:
        values = self._values.get(tensor.number)
        if values is None:
            values = self._values[tensor.number] = torch.empty_like(tensor.live)
        self._exchange.write_shared_param(tensor, values)
        for layer, part in tensor.parts(values):
            layer.aside, layer.parameter.data = layer.parameter.data, layer.shaped(part)
            self._versions[id(layer.parameter)] = layer.parameter._version
