"""For scripts that compile nothing: the first optimizer that is made imports torch._dynamo, which takes a worker about
as long as importing torch itself. What torch asks of it in vain is missed aloud, as an AttributeError.

Drills and tests/runtime train with the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class OptimizedModule:
    """What a compiled module would be; there is none."""


class NoCompiler(ModuleType):
    """What optimizers, init_process_group and Atoll's hooks ask of torch._dynamo."""

    OptimizedModule = OptimizedModule
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(function: Any, *_: object, **__: object) -> Any:
        return function

    @staticmethod
    def graph_break() -> None: ...


sys.modules["torch._dynamo"] = NoCompiler("torch._dynamo")
