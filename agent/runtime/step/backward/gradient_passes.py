"""Single passes over the memory of gradients; and gradients that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from atoll import kernels
from atoll.agent.runtime.model.memory_order import flat_view
from atoll.errors import BadInput


def scale_into(out: torch.Tensor, gradient: torch.Tensor, weight: float) -> None:
    """Compute out = weight * gradient. Weight 0 gives zeros, whatever `gradient` holds: 0 * NaN would be NaN.

    Equal shapes; `out` may be `gradient` itself."""
    if weight == 0:
        out.zero_()
    elif out.data_ptr() == gradient.data_ptr():
        if weight != 1:
            out.mul_(weight)
    else:
        torch.mul(gradient.detach(), weight, out=out)


def coalesced(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient with each index once if it is sparse."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Raises BadInput for a gradient that is not dense."""
    if gradient.layout != torch.strided:
        raise BadInput(f"parameter {name} has a sparse gradient; build its embedding with sparse=False")


def refuse_second(name: str, came: bool) -> None:
    """Raises BadInput where this pass's gradient has left already. came: whether one did."""
    if came:
        raise BadInput(
            f"parameter {name} got two gradients in one pass. Call run.backward(loss) in place of "
            "loss.backward() for each of several losses, and use_reentrant=False in activation checkpointing"
        )


def squared_norm(tensor: torch.Tensor) -> torch.Tensor | float:
    """The sum of squares. On a GPU it stays there, so that nobody waits for it before all are queued.

    A sparse one is coalesced."""
    tensor = tensor.values() if tensor.is_sparse else tensor
    readable = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    if readable and (flat_N := flat_view(tensor)) is not None:
        return kernels.squared_norm(flat_N, threads=torch.get_num_threads())
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm.square()


def clip_norm(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip as torch.nn.utils.clip_grad_norm_ does; coalesced sparse gradients too. Returns the norm before."""
    parameters = list(parameters)
    if not any(one.grad is not None and one.grad.is_sparse for one in parameters):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    gradients = [one.grad for one in parameters if one.grad is not None]
    entries = [one.values() if one.is_sparse else one for one in gradients]
    norm: torch.Tensor = torch.stack([torch.linalg.vector_norm(one) for one in entries]).norm()
    for one in entries:
        one.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def total(parts: Sequence[torch.Tensor | float]) -> float:
    """Return the sum. Waits for a GPU once, not once for each part."""
    on_device = [part for part in parts if isinstance(part, torch.Tensor)]
    rest = sum(part for part in parts if not isinstance(part, torch.Tensor))
    return rest + (torch.stack(on_device).sum(dtype=torch.float64).item() if on_device else 0.0)
