"""The optimizers of the exchange engine, called by themselves: SGD and Adam that touch only the blocks an update has.

Shapes: N parameters, K blocks, B = ceil(N / 16). shared_param and moments: float32 [N], updated in place. index: uint32
or int32 [K], ascending; values: float32 [K, 16], the (summed) gradients of those blocks, multiplied by `scale` first
(for gradient clipping: the norm to clip is that of the values). live: None, or a copy of the parameters [N] in float32,
float16 or bfloat16 that is brought up to date, rounded as torch rounds, where shared_param changes.

Parameters in no block keep their value and their moments. Weight decay acts on touched blocks alone, once a touch.
last_step: None, or int32 [B], zeros at first: the step a block was last touched in. With it the moments of a block are
first decayed by momentum^missed (Adam: beta1^missed and beta2^missed) for the steps it was missed.

A block with a NaN or an infinity is left out whole; both functions return how many were. The result has the same bits
for every number of threads, on every processor. Whatever does not fit raises `BadInput` and changes nothing.
Source: StellaTrain (SIGCOMM '24), section 3.1; the rules are those of torch.optim, with moments that begin as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import native_parts

from atoll.errors import BadInput
from atoll.kernels.refusals import refusals


def sgd_blocks(
    shared_param: Any,
    index: Any,
    values: Any,
    *,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    momentum_buffer: Any = None,
    last_step: Any = None,
    step: int = 1,
    live: Any = None,
    scale: float = 1.0,
    threads: int = 0,
) -> int:
    """g += weight_decay * p;  m = momentum * m + g;  p -= lr * m  (nesterov: p -= lr * (g + momentum * m)).

    momentum_buffer: m, needed if momentum is not 0. step: from 1, used with last_step alone.
    """
    if (momentum != 0 or nesterov) and momentum_buffer is None:
        raise BadInput(f"sgd_blocks: momentum = {momentum} needs momentum_buffer; pass zeros, as long as shared_param")
    rule = "nesterov" if nesterov else "sgd"
    with refusals("sgd_blocks"):
        return _update(
            threads, shared_param, momentum_buffer, None, last_step, live, index, values, rule, step, lr, weight_decay,
            momentum, 0.0, 0.0, scale,
        )  # fmt: skip


def adam_blocks(
    shared_param: Any,
    index: Any,
    values: Any,
    *,
    first_moment: Any,
    second_moment: Any,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    last_step: Any = None,
    live: Any = None,
    scale: float = 1.0,
    threads: int = 0,
) -> int:
    """torch.optim.Adam, or AdamW if decoupled, on touched blocks.

    step: from 1, the step of the training; bias correction uses it for every block, however often it was touched.
    weight_decay: added to the gradient, or if decoupled: p *= 1 - lr * weight_decay.
    """
    rule = "adamw" if decoupled else "adam"
    with refusals("adam_blocks"):
        return _update(
            threads, shared_param, first_moment, second_moment, last_step, live, index, values, rule, step, lr,
            weight_decay, beta1, beta2, epsilon, scale,
        )  # fmt: skip


def _update(threads: int, shared_param: Any, *arguments: Any) -> int:
    on_cpu: Callable[..., int] = native_parts.load().update_blocks
    return on_cpu(shared_param, *arguments, threads)
