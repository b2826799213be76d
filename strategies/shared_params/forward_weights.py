"""Passes at the shared parameters.

In forward and backward passes parameters have the shared values. They have their own values, which are ahead of those,
while the optimizer updates them and others' updates come in.

A gradient at own weights includes this rank's own updates at once, and others' only when they come. The others' data
may undo what a rank learns from its own data. Then its own weights soon fit its data alone, and their gradients carry
almost nothing for the shared parameters. Gradients at the shared parameters lack only what is not sent yet, and are
gradients of the model that is trained (error feedback: EF-SGD, Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.errors import BadInput
from atoll.strategies.shared_params.engine_tensors import EngineTensor
from atoll.strategies.shared_params.exchange import LayerExchange


class ForwardWeights:
    """Weights that passes use. On the training thread alone. `at_shared_params` may change between two steps."""

    def __init__(self, exchange: LayerExchange) -> None:
        self._exchange = exchange
        self.at_shared_params = False
        self._values: dict[int, torch.Tensor] = {}  # [N] by tensor, as its live weights
        self._taken: dict[int, EngineTensor] = {}
        self._versions: dict[int, int] = {}  # of parameters with the shared parameters' values, by id
        self._taken_before: list[EngineTensor] = []  # `show`

    @property
    def taken(self) -> list[EngineTensor]:
        """Return the tensors whose parameters have the shared values now."""
        return list(self._taken.values())

    def show(self, tensors: Sequence[EngineTensor], before: Sequence[EngineTensor]) -> None:
        """Give the parameters of all these the shared values as they are now, until `hide`. before: the tensors `taken`
        by a pass that is under way, which have the shared values until `release`."""
        self.release()
        self._taken_before = list(before)
        self._take(tensors)

    def hide(self) -> None:
        """Undo `show`: return the parameters to the values that they had."""
        self.release()
        if not self.at_shared_params:
            self._values.clear()  # as large as the model
        self._take(self._taken_before)

    def take(self, tensors: Sequence[EngineTensor]) -> list[torch.Tensor]:
        """Give the parameters of these tensors the shared values before a forward pass, until `release`.

        Returns the values of the tensors that did not have them, [N] each; none where passes are at own weights."""
        if not self.at_shared_params:
            return []
        new = [one for one in tensors if one.number not in self._taken]
        self._take(new)
        return [self._values[one.number] for one in new]

    def check_unwritten(self) -> None:
        """Raise BadInput for a parameter that the script wrote while it had the shared values: `release` drops them."""
        for layer in (layer for tensor in self._taken.values() for layer in tensor.layers):
            if layer.parameter._version != self._versions[id(layer.parameter)]:
                raise BadInput(
                    f"the script wrote parameter {layer.name} between its forward pass and optimizer.step(), where it "
                    'holds the shared values (gradients = "shared_params"). Write to it after optimizer.step()'
                )

    def release(self) -> None:
        """Return all parameters to their own values."""
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
