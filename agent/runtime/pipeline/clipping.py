"""Clips the gradient of a whole model whose stages are on several workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from atoll.agent.runtime.pipeline.wire import StageLinks

EPSILON: Final = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def clip_over_stages(parameters: Iterable[torch.Tensor], max_norm: float, links: StageLinks) -> float:
    """Bring the gradient's global L2 norm, over all stages, down to max_norm. All stages call it together. Returns the
    norm before, the same on each. Raises PeerLost."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    own = sum(float(one.detach().double().square().sum()) for one in gradients)
    norm = math.sqrt(links.add_up(own))
    factor = max_norm / (norm + EPSILON)
    if factor < 1 or math.isnan(norm):
        for one in gradients:
            one.detach().mul_(factor)
    return norm
