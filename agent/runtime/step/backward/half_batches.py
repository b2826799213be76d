"""The noise of a worker's own gradients where nobody combines those of all workers in full: the two halves of its batch
are compared as two workers would be (planner `gns`), at the same weights and in the same pass.

The gradient of a linear layer's weight is a sum over samples, of its output's gradient times its input, so that of half
of them is had without another pass; likewise a convolution's. Of each layer's weight a few rows are looked at. Two
successive steps would do as well if the model did not move between them: with a noise scale of 9 they said 51."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeGuard, cast

import torch
from torch import nn
from torch.nn.grad import conv2d_weight

from atoll.agent.runtime.data.loader import Loader
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.model.module_hooks import ModuleHook
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.pass_state import NORMS_EVERY_STEPS
from atoll.agent.runtime.strategy_interface.capabilities import Norms
from atoll.v1.common_pb2 import LEVEL_INFO

SHARE: Final = 0.001
"""Of the rows of each weight: a row is what one output has of it."""
LEAST_ROWS: Final = 8
"""Outputs that are never active have none."""


class HalfBatches:
    """Hooks of a model's forward passes that measure the gradients of both halves of a batch, in sampled steps.

    Used by the training thread alone.

    Samples are the first dimension of what a layer gets, or the outer part of it. A layer whose output is changed in
    place may be left out, as one that is compiled is. Measuring never raises into the user's pass: a layer in which it
    fails is measured no more."""

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        sampled: Callable[[], BatchSlice | None],
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """sampled: the batch of the step under way, where it is to be looked at. notice: told of the first layer in
        which measuring fails."""
        self._sampled, self._notice = sampled, notice
        self._failed: set[int] = set()  # layers that are measured no more
        generator = torch.Generator().manual_seed(seed % 2**63)
        self._step = -1
        self._names: list[str] = []
        self._rows: list[torch.Tensor] = []
        self._scale: list[float] = []
        self._halves: dict[
            int, list[torch.Tensor]
        ] = {}  # sums over the first half's samples, and the second's, [r, ...]
        self._hooks = []
        for name, layer in model.named_modules():
            if not _is_known(layer):
                continue
            outputs = len(cast(torch.Tensor, layer.weight))
            rows = torch.randperm(outputs, generator=generator)[: max(math.ceil(SHARE * outputs), LEAST_ROWS)]
            hook = ModuleHook(self._on_forward, len(self._rows))
            self._hooks.append(layer.register_forward_hook(hook, with_kwargs=True))
            self._names.append(name or "the model")
            self._rows.append(rows)
            self._scale.append(math.sqrt(outputs / len(rows)))

    def take(self) -> Norms:
        """Return the norms of two halves after a backward pass, as Norms says; empty norms if none were seen."""
        halves, batch = self._halves, self._sampled()
        self._halves = {}
        if not halves or batch is None or len({one.device for sums in halves.values() for one in sums}) > 1:
            return Norms()
        first, second = batch.local // 2, batch.local - batch.local // 2
        a_K, b_K = (
            torch.cat([self._scale[i] * halves[i][half].reshape(-1) for i in sorted(halves)]) for half in (0, 1)
        )
        whole_K = a_K + b_K  # the sum over all samples; halves' means are B / b_i times theirs
        weighted = batch.local * (a_K.square().sum() / first + b_K.square().sum() / second)
        local, together = torch.stack([weighted, whole_K.square().sum()]).tolist()
        return Norms(local, together, halves=True)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_forward(self, number: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._watch(number, layer, args[0] if args else kwargs.get("input"), output)
        except Exception as error:  # noqa: BLE001 - layers get anything, and none of it may end the user's pass
            self._fail(number, error)

    def _watch(self, number: int, layer: nn.Module, given: Any, output: Any) -> None:
        batch = self._sampled()
        if batch is None or batch.local < 2 or not (_is_batch(given, layer) and _is_batch(output, layer)):
            return
        if batch.step != self._step:  # what a pass left that was broken off
            self._step, self._halves = batch.step, {}
        if output.requires_grad and len(given) % batch.local == 0 and len(output) == len(given):
            split = len(given) // batch.local * (batch.local // 2)
            on_gradient = partial(self._on_gradient, number, layer, given.detach(), split)
            output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(
        self, number: int, layer: nn.Module, given: torch.Tensor, split: int, gradient: torch.Tensor
    ) -> None:
        if number not in self._failed:
            try:
                self._add(number, layer, given, split, gradient)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        if not self._failed:
            self._notice(
                f"gradient noise is measured without layer {self._names[number]}, and others that fail so: "
                f"{type(error).__name__}: {error}. Training is as it would be"
            )
        self._failed.add(number)
        self._halves.pop(number, None)
        self._hooks[number].remove()

    @torch.no_grad()
    def _add(self, number: int, layer: nn.Module, given: torch.Tensor, split: int, gradient: torch.Tensor) -> None:
        rows = self._rows[number] = self._rows[number].to(given.device)
        halves = [
            _of_rows(layer, x, y, rows)
            for x, y in ((given[:split], gradient[:split]), (given[split:], gradient[split:]))
        ]
        known = self._halves.get(number)
        self._halves[number] = halves if known is None else [a + b for a, b in zip(known, halves, strict=True)]


def half_batches_of(session: Session, model: nn.Module, loader: Loader[Any]) -> HalfBatches | None:
    """Measure the noise of the batches that the loader hands out, in sampled steps. None if no agent asks for it."""
    if session.link is None:
        return None

    def sampled() -> BatchSlice | None:
        batch = loader.current
        return batch if batch is not None and batch.step % NORMS_EVERY_STEPS == 0 else None

    return HalfBatches(model, session.seed, sampled, partial(session.notice, LEVEL_INFO))


def _is_known(layer: nn.Module) -> bool:
    """Reading the weight of a parametrized layer would compute it: spectral_norm moves its buffers then."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.requires_grad:
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)


def _is_batch(value: Any, layer: nn.Module) -> TypeGuard[torch.Tensor]:
    """Return whether this may be a batch that the layer takes or gives."""
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    return (
        dense and value.is_floating_point() and (value.dim() == 4 if isinstance(layer, nn.Conv2d) else value.dim() >= 2)
    )


def _of_rows(layer: nn.Module, given: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of these rows of the layer's weight, float32 [r, inputs] or [r, channels, height, width], as of the
    samples in `given` and `gradient`, which is the output's.

    Only the chosen rows become float32: the gradient of a language model's last layer takes gigabytes."""
    if isinstance(layer, nn.Conv2d):
        shape = (len(rows), *layer.weight.shape[1:])
        taken = gradient.index_select(1, rows).float()
        found: torch.Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
            given.float(), shape, taken, layer.stride, layer.padding, layer.dilation
        )
        return found
    return gradient.flatten(0, -2).index_select(1, rows).float().T @ given.flatten(0, -2).float()
