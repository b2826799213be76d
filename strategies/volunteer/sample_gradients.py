"""Computes the gradient of some samples: the same on a server and on a volunteer, which both run the job's script."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.agent.runtime.api.engine_inputs import pair_of
from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.backward.batch_statistics import batch_statistics_layers
from atoll.agent.runtime.step.capabilities import EngineParts
from atoll.agent.runtime.step.state.randomness import seed_step
from atoll.errors import BadInput

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SampleGradients:
    """Of one worker. Vectors are float32 on the CPU, with P entries: one for each that trains, in the model's order.

    Raises BadInput for a model whose gradient is not a sum over samples, or that float32 does not hold."""

    def __init__(self, session: Session, model: nn.Module, parts: EngineParts) -> None:
        self._session, self._model, self._parts = session, model, parts
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self._sizes = [one.numel() for one in self.parameters]
        self.size = sum(self._sizes)
        """P."""
        if layers := batch_statistics_layers(model):
            raise BadInput(
                f"strategy volunteer adds up gradients that are computed apart, and {type(layers[0]).__name__} needs "
                "all of a batch together. Use GroupNorm or LayerNorm, or freeze it with eval()"
            )
        for one in self.parameters:
            if one.dtype not in FLOATS:
                raise BadInput(f"strategy volunteer sends weights as float32, and a parameter is {one.dtype}")

    def weights(self) -> torch.Tensor:
        """[P]."""
        return torch.cat([one.detach().reshape(-1).float().cpu() for one in self.parameters])

    @torch.no_grad()
    def load(self, weights_P: torch.Tensor) -> None:
        """Raises BadInput for those of another model."""
        if weights_P.dtype != torch.float32 or weights_P.shape != (self.size,):
            raise BadInput(
                f"the server's weights are {weights_P.dtype} {tuple(weights_P.shape)}, this model's float32 "
                f"({self.size},). The script has to make the same model wherever it runs"
            )
        for one, piece in zip(self.parameters, torch.split(weights_P, self._sizes), strict=True):
            one.copy_(piece.reshape(one.shape))

    def compute(self, indices: Sequence[int], step: int) -> list[torch.Tensor]:
        """[gradient [P], loss [1]], both summed over the samples. indices: of the dataset.

        What is drawn on the way (dropout, augmentation) is a function of the first sample and the step, wherever that
        is computed: answers can be compared. p.grad is used, and left to be overwritten."""
        parts, session = self._parts, self._session
        seed_step(session.seed, indices[0], step)
        session.throttle.resume()
        inputs, targets = pair_of(parts.collate_fn([parts.dataset[one] for one in indices]), session.device)
        for parameter in self.parameters:
            parameter.grad = None
        loss = parts.loss(self._model(inputs), targets)
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch")
        summed = loss.reshape(()) * len(indices)
        summed.backward()  # type: ignore[no-untyped-call]
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        answer = torch.cat([one.reshape(-1).float().cpu() for one in gradients])
        session.throttle.pay()
        return [answer, summed.detach().reshape(1).float().cpu()]

    @torch.no_grad()
    def set_gradient(self, mean_P: torch.Tensor) -> None:
        """As p.grad."""
        for one, piece in zip(self.parameters, torch.split(mean_P, self._sizes), strict=True):
            one.grad = piece.reshape(one.shape).to(one)
