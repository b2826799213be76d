"""Every algorithm of strategy `compressed`, each with the settings that tests give it."""

from __future__ import annotations

from typing import Final

import pytest

from atoll.strategies.compressed.settings import Compressed

SETTINGS: Final = {
    "float16": Compressed(algorithm="float16"),
    "int8": Compressed(algorithm="int8"),
    "int4": Compressed(algorithm="int4"),
    "random-k": Compressed(algorithm="random-k", density=0.1),
    "dgc": Compressed(algorithm="dgc", density=0.1),
    "ef-sign": Compressed(algorithm="ef-sign"),
    "one-bit": Compressed(algorithm="one-bit"),
    "threshold": Compressed(algorithm="threshold", threshold=1.0),
    "power": Compressed(algorithm="power", rank=3),
}
EVERY: Final = pytest.mark.parametrize("name", list(SETTINGS))
