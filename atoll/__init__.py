"""Train one PyTorch model across islands of unequal devices.

`import atoll` imports neither torch nor grpc; what `__all__` names brings torch with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.agent.runtime.api.run import Run, init
    from atoll.strategies.settings import Dense, StaleSparse

__all__ = ["Dense", "Run", "StaleSparse", "init"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    try:
        from atoll.agent.runtime.api import run
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "zmq", "xxhash"):
            raise
        from atoll.errors import BadInput

        raise BadInput(f"training needs {error.name}, which is not installed: pip install 'atoll[train]'") from error
    return getattr(run, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
