"""The state of one replica as one vector: parameters, floating buffers and what the optimizer keeps of each parameter.

Averaging Adam's second moments would keep the variance of one replica's gradients, though k replicas that average have
a k-th of it. SDPipe (2023, section 4) rebuilds it. With s the running mean of gradients (with beta_2, as v has it, so
that v - s^2 is a variance and never negative), of a group of k:

    V = mean(v) - mean(s)^2        v <- mean(v) - (1 - 1/k) V

What was taken away counts in again before the next average, decayed as v is: else each average would take a part of
what the one before left, and the variance would go to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from atoll.errors import BadInput

F32 = npt.NDArray[np.float32]

MEAN: Final = "exp_avg_of_v"  # s
REMOVED: Final = "variance_removed"  # (1 - 1/k) V, as of the last average
ADAM: Final = (torch.optim.Adam, torch.optim.AdamW)


class ReplicaState:
    """`read` and `write` between two updates. Raises BadInput at once for what cannot be averaged."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._check(model, optimizer)
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._adam = isinstance(optimizer, ADAM)
        self._weights = [one.detach() for one in model.parameters() if one.requires_grad]
        self._buffers = [one for one in model.buffers() if one.is_floating_point()]
        self._counts = [one for one in model.buffers() if not one.is_floating_point()]  # as BatchNorm's batches
        self._decay = 1.0  # of REMOVED since the last average
        self.prepare()
        self._hook = optimizer.register_step_pre_hook(self._before_update) if self._adam else None
        self.size = sum(one.numel() for one in self._tensors()) + 1
        """Entries of the vector."""
        self.weights = sum(one.numel() for one in self._weights)
        """Of these the first, which are parameters."""

    def prepare(self) -> None:
        """Give every parameter the state that the optimizer would make at its first update: a replica may average
        before that. After a checkpoint was read it is there already."""
        for group, parameter in self._trained():
            state = self._optimizer.state[parameter]
            if self._adam:
                if "step" not in state:
                    on_device = group["capturable"] or group["fused"]
                    state["step"] = torch.zeros((), device=parameter.device if on_device else "cpu")
                for name in ("exp_avg", "exp_avg_sq", MEAN, REMOVED):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif group["momentum"] and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def read(self) -> F32:
        """A copy, float32 [size]: in the order in which `write` takes it; the last entry is Adam's step. Forward and
        backward passes may run beside it."""
        flat = np.empty(self.size, np.float32)
        at = 0
        for tensor, removed in zip(self._tensors(), self._removed(), strict=True):
            whole = tensor if removed is None else torch.add(tensor, removed, alpha=self._decay)
            flat[at : at + tensor.numel()] = whole.reshape(-1).cpu().numpy()
            at += tensor.numel()
        flat[-1] = self._steps()
        return flat

    @torch.no_grad()
    def write(self, flat: F32, replicas: float, read: F32 | None = None) -> None:
        """Take over an average of so many replicas (unequal weights make fewer of them); 1: it was nobody else's. read:
        what this one's state was in it, where forward passes may have changed buffers since: that stays."""
        at, buffers = 0, {id(one) for one in self._buffers}
        for tensor in self._tensors():
            here = slice(at, at + tensor.numel())
            part = torch.from_numpy(flat[here]).view(tensor.shape)
            if read is not None and id(tensor) in buffers:
                part = part + (tensor.cpu() - torch.from_numpy(read[here]).view(tensor.shape))
            tensor.copy_(part)
            at += tensor.numel()
        self._decay = 1.0
        for _, parameter in self._trained() if self._adam else ():
            state = self._optimizer.state[parameter]
            state["step"].fill_(float(flat[-1]))
            variance = (state["exp_avg_sq"] - state[MEAN].square()).clamp_(min=0)
            torch.mul(variance, 1 - 1 / replicas, out=state[REMOVED])
            state["exp_avg_sq"] -= state[REMOVED]

    def copy(self) -> list[torch.Tensor]:
        """For `restore`."""
        return [one.detach().clone() for one in self._whole()]

    @torch.no_grad()
    def restore(self, copied: list[torch.Tensor]) -> None:
        for tensor, kept in zip(self._whole(), copied, strict=True):
            tensor.copy_(kept)
        self._decay = 1.0

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self._groups:
            yield from ((group, one) for one in group["params"] if one.requires_grad)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._weights
        yield from self._buffers
        for group, parameter in self._trained():
            state = self._optimizer.state[parameter]
            if self._adam:
                yield from (state["exp_avg"], state[MEAN], state["exp_avg_sq"])
            elif group["momentum"]:
                yield state["momentum_buffer"]

    def _whole(self) -> Iterator[torch.Tensor]:
        """All that an update or an average changes; at a round's end REMOVED has not decayed."""
        yield from (*self._tensors(), *self._counts)
        for _, parameter in self._trained() if self._adam else ():
            state = self._optimizer.state[parameter]
            yield from (state[REMOVED], state["step"])

    def _removed(self) -> Iterator[torch.Tensor | None]:
        """Beside `_tensors`: what is added before an average."""
        yield from (None for _ in (*self._weights, *self._buffers))
        for group, parameter in self._trained():
            if self._adam:
                yield from (None, None, self._optimizer.state[parameter][REMOVED])
            elif group["momentum"]:
                yield None

    def _steps(self) -> float:
        steps = [float(self._optimizer.state[one]["step"]) for _, one in self._trained()] if self._adam else []
        return max(steps, default=0.0)

    @torch.no_grad()
    def _before_update(self, *_: object) -> None:
        self._decay *= self._groups[0]["betas"][1]
        for group, parameter in self._trained():
            mean = self._optimizer.state[parameter][MEAN]
            if parameter.grad is not None:
                mean.lerp_(parameter.grad, 1 - group["betas"][1])

    @staticmethod
    def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, one in [*model.named_parameters(), *model.named_buffers()]:
            if one.is_floating_point() and one.dtype != torch.float32:
                raise BadInput(
                    f"strategy groups averages float32, and {name} is {one.dtype}. Use torch.autocast for less"
                )
        if not isinstance(optimizer, (torch.optim.SGD, *ADAM)):
            raise BadInput(
                f"strategy groups cannot average what {type(optimizer).__name__} keeps. Use SGD, Adam or AdamW"
            )
        for group in optimizer.param_groups:
            if group.get("amsgrad") or group.get("dampening"):
                raise BadInput("strategy groups cannot average the state of amsgrad or dampening. Leave them out")
        if len({group["betas"][1] for group in optimizer.param_groups if "betas" in group}) > 1:
            raise BadInput("strategy groups takes one beta_2 for all parameters, not another for some of them")
