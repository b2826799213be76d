"""Placeholder in p.grad after the engine took the gradient, so that the script does not clip or read zeros unawares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from atoll.errors import BadInput

# What zero_grad(set_to_none=False) calls.
_HARMLESS: Final = frozenset({"requires_grad_", "detach_", "zero_", "__get__"})


class TakenGradient(torch.Tensor):
    """Placeholder of the gradient's shape, without memory. Using it raises BadInput."""

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
