"""Names of the compression algorithms, as users write them."""

from __future__ import annotations

from typing import Literal, TypeAlias

Algorithm: TypeAlias = Literal["float16", "int8", "int4", "random-k", "dgc", "ef-sign", "one-bit", "threshold", "power"]
