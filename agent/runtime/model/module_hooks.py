"""Hooks on the user's modules, which copies of these modules do without."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, Final

_NOTHING: Final = nullcontext().__exit__
"""Takes any arguments and returns None; a pickle of it loads where Atoll is not installed."""


class ModuleHook(partial[Any]):
    """A hook that deep-copies and pickles to one that does nothing.

    copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model) and torch.save(model) copy a module's hooks too,
    and the strategy behind them belongs to the prepared model alone."""

    def __deepcopy__(self, memo: Any) -> Any:
        return _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
