"""Load the native parts that only tests and benchmarks call by themselves, from the tree in which Atoll was built."""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(__file__).parents[2] / "build"


@cache
def load() -> ModuleType:
    """Return module _native_parts (tests/kernels/native/parts). Skip the test if Atoll was not built in this tree."""
    found = [file.parent for file in BUILD.glob("*/kernels/_native*") if file.is_file()]
    if not found:
        pytest.skip("an installed wheel has no module _native_parts: parts of the engine were NOT tested by themselves")
    name = f"_native_parts{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = next((folder / name for folder in found if (folder / name).exists()), None)
    assert path is not None, f"no {name} in {BUILD}: build it by `make setup`"
    spec = importlib.util.spec_from_file_location("_native_parts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stop_threads() -> None:
    """End the threads of the module's own pool, if it was loaded."""
    if load.cache_info().currsize:
        load().stop_threads()
