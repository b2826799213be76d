"""The state of one replica as one vector: parameters, floating buffers and what the optimizer keeps of each parameter.

Averaging Adam's second moments would keep the variance of one replica's gradients, though k replicas that average have
a k-th of it. SDPipe (2023, section 4) rebuilds it. After t updates v and s, the running means of squared gradients and
of gradients, have weights (1 - beta_2) beta_2^(t - i), i = 1 ... t, which add up to c = 1 - beta_2^t. A group of k has

    q = (1 - beta_2) (1 + beta_2^t) / ((1 + beta_2) c)     sum of the squares of the weights over c: the noise of s
    V = (mean(v) - mean(s)^2 / c) / (1 - q / k)            c times the variance of a gradient, unbiased, never negative
    v <- mean(v) - (1 - 1/k) V                             at least mean(s)^2 / c; at t = 1 the squared mean gradient

So v moves from mean(v) towards mean(s)^2 / c, by a part of (1 - 1/k) / (1 - q/k).

What was taken away counts in again before the next average, decayed as v is: else each average would take a part of
what the one before left, and the variance would go to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.strategies.declaration import StrategySettings
from atoll.strategies.groups.averaging import MAX_MEMBERS

F32 = npt.NDArray[np.float32]

MEAN: Final = "exp_avg_of_v"  # s
REMOVED: Final = "variance_removed"  # (1 - 1/k) V, as of the last average
ADAM: Final = (torch.optim.Adam, torch.optim.AdamW)


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for too many replicas, and for state that cannot be averaged."""
    parts = script.engine_parts
    if parts is not None and parts.place.pipelines > MAX_MEMBERS:
        raise BadInput(f"strategy groups takes at most {MAX_MEMBERS} replicas")
    for name, one in [*script.model.named_parameters(), *script.model.named_buffers()]:
        if one.is_floating_point() and one.dtype != torch.float32:
            raise BadInput(f"strategy groups averages float32, and {name} is {one.dtype}. Use torch.autocast for less")
    for optimizer in script.optimizers:
        if not isinstance(optimizer, (torch.optim.SGD, *ADAM)):
            raise BadInput(
                f"strategy groups cannot average what {type(optimizer).__name__} keeps. Use SGD, Adam or AdamW"
            )
        if any(group.get("amsgrad") or group.get("dampening") for group in optimizer.param_groups):
            raise BadInput("strategy groups cannot average the state of amsgrad or dampening. Leave them out")


class ReplicaState:
    """`read` and `write` between two updates, of a checked script."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._adam = isinstance(optimizer, ADAM)
        self._weights = [one.detach() for one in model.parameters() if one.requires_grad]
        self._buffers = [one for one in model.buffers() if one.is_floating_point()]
        self._counts = [one for one in model.buffers() if not one.is_floating_point()]  # as BatchNorm's batches
        self.prepare()
        self._hook = optimizer.register_step_pre_hook(self._before_update) if self._adam else None
        self.size = sum(one.numel() for one, _ in self._averaged())
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
        """A copy, float32 [size]: in the order in which `write` takes it. Forward and backward passes may run beside
        it."""
        flat = np.empty(self.size, np.float32)
        at = 0
        for tensor, removed in self._averaged():
            whole = tensor if removed is None else tensor + removed
            flat[at : at + tensor.numel()] = whole.reshape(-1).cpu().numpy()
            at += tensor.numel()
        return flat

    @torch.no_grad()
    def write(self, flat: F32, replicas: float, read: F32 | None = None) -> None:
        """Take over an average of so many replicas (unequal weights make fewer of them); 1: it was nobody else's. read:
        what this one's state was in it, where forward passes may have changed buffers since: that stays."""
        at, buffers = 0, {id(one) for one in self._buffers}
        for tensor, _ in self._averaged():
            here = slice(at, at + tensor.numel())
            part = torch.from_numpy(flat[here]).view(tensor.shape)
            if read is not None and id(tensor) in buffers:
                part = part + (tensor.cpu() - torch.from_numpy(read[here]).view(tensor.shape))
            tensor.copy_(part)
            at += tensor.numel()
        for group, parameter in self._trained() if self._adam else ():
            _remove_variance(self._optimizer.state[parameter], group["betas"][1], replicas)

    def copy(self) -> list[torch.Tensor]:
        """Return a copy of the state for `restore`."""
        return [one.detach().clone() for one in self._whole()]

    @torch.no_grad()
    def restore(self, copied: list[torch.Tensor]) -> None:
        for tensor, kept in zip(self._whole(), copied, strict=True):
            tensor.copy_(kept)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self._groups:
            yield from ((group, one) for one in group["params"] if one.requires_grad)

    def _averaged(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Everything that is averaged, each with what is added to it before."""
        yield from ((one, None) for one in (*self._weights, *self._buffers))
        for group, parameter in self._trained():
            state = self._optimizer.state[parameter]
            if self._adam:
                yield from ((state[name], None) for name in ("step", "exp_avg", MEAN))
                yield state["exp_avg_sq"], state[REMOVED]
            elif group["momentum"]:
                yield state["momentum_buffer"], None

    def _whole(self) -> Iterator[torch.Tensor]:
        """All that an update or an average changes."""
        for tensor, removed in self._averaged():
            yield from (tensor,) if removed is None else (tensor, removed)
        yield from self._counts

    @torch.no_grad()
    def _before_update(self, *_: object) -> None:
        """Add to MEAN what the update adds to exp_avg_sq of this gradient."""
        for group, parameter in self._trained():
            if (gradient := parameter.grad) is None:
                continue
            state, beta_2 = self._optimizer.state[parameter], group["betas"][1]
            if group["maximize"]:
                gradient = -gradient
            if group["weight_decay"] and not _is_decoupled(self._optimizer, group):
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state[MEAN].lerp_(gradient, 1 - beta_2)
            state[REMOVED].mul_(beta_2)


def _remove_variance(state: dict[str, torch.Tensor], beta_2: float, replicas: float) -> None:
    """Split Adam's averaged state of a parameter: the second moment becomes that of the replicas' mean gradient,
    REMOVED the rest. Equations: at the top of this file."""
    steps = float(state["step"])
    if replicas <= 1 or steps <= 0:
        state[REMOVED].zero_()
        return
    decayed = beta_2**steps
    weight = 1 - decayed
    noise = (1 - beta_2) * (1 + decayed) / ((1 + beta_2) * weight)
    part = (1 - 1 / replicas) / (1 - noise / replicas)
    second, of_mean = state["exp_avg_sq"], state[MEAN].square().div_(weight)
    rebuilt = torch.maximum(second.lerp(of_mean, part), of_mean)
    torch.sub(second, rebuilt, out=state[REMOVED]).clamp_(min=0)
    second.copy_(rebuilt)  # second - REMOVED would round small ones to 0


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return True if weight decay is separate from the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
