"""Train one PyTorch model across islands of unequal devices.

`import atoll` imports neither torch nor grpc. `Run` and `init` bring torch with them, the client grpc: no script should
use both, for grpc and worker processes that are forked crash together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from atoll.agent.runtime.api.run import Run, init
    from atoll.cli.render.wire import to_plain
    from atoll.client.client import AsyncClient, Client
    from atoll.client.submission import submit
    from atoll.strategies.compressed.settings import Compressed
    from atoll.strategies.dense.settings import Dense
    from atoll.strategies.groups.settings import Groups
    from atoll.strategies.local_steps.settings import LocalSteps
    from atoll.strategies.stale_sparse.settings import StaleSparse
    from atoll.strategies.zen.settings import Zen

__all__ = [
    "AsyncClient",
    "Client",
    "Compressed",
    "Dense",
    "Groups",
    "LocalSteps",
    "Run",
    "StaleSparse",
    "Zen",
    "init",
    "submit",
    "to_plain",
]

_WITHOUT_TORCH = {
    "AsyncClient": "atoll.client.client",
    "Client": "atoll.client.client",
    "submit": "atoll.client.submission",
    "to_plain": "atoll.cli.render.wire",
}


def __getattr__(name: str) -> object:
    if name in _WITHOUT_TORCH:
        return getattr(import_module(_WITHOUT_TORCH[name]), name)
    if name not in ("Run", "init"):
        return _settings_called(name) if name[:1].isupper() else _absent(name)
    try:
        from atoll.agent.runtime.api import run
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "zmq", "xxhash", "cloudpickle"):
            raise
        from atoll.errors import BadInput

        raise BadInput(f"training needs {error.name}, which is not installed: pip install 'atoll[train]'") from error
    return getattr(run, name)


def _settings_called(name: str) -> object:
    """The settings of a strategy, by the name of their class."""
    from atoll.strategies import registry

    for strategy in registry.strategies().values():
        if strategy.settings.__name__ == name:
            return strategy.settings
    return _absent(name)


def _absent(name: str) -> NoReturn:
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
