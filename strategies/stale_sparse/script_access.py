"""Refuse what a script does to gradients that the engine took, and to weights where the shared parameters alone are
true."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from atoll.errors import BadInput
from atoll.strategies.shared_params.layout import Layer

# What zero_grad(set_to_none=False) calls.
_HARMLESS: Final = frozenset({"requires_grad_", "detach_", "zero_", "__get__"})


class TakenGradient(torch.Tensor):
    """Placeholder in p.grad of the gradient's shape, without memory: the script must not clip or read zeros unawares.

    Using it raises BadInput."""

    @staticmethod
    def like(parameter: torch.Tensor) -> TakenGradient:
        return parameter.detach().new_zeros(()).expand(parameter.shape).as_subclass(TakenGradient)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "TakenGradient()"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _HARMLESS:
            if func.__name__ == "__get__":
                return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            return args[0]
        raise BadInput(
            f"{getattr(func, '__name__', func)} on a gradient: under strategy stale-sparse gradients leave during the "
            "backward pass and are not in p.grad afterwards. Clip with run.clip_grad_norm(max_norm); use bfloat16 in "
            "place of a GradScaler"
        )


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
