"""Message in which workers report the costs of tensors, links and compression to the controller half."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from atoll.strategies.compressed.codes.algorithm import Algorithm
from atoll.strategies.declaration import Declared

_Seconds = Annotated[float, Field(ge=0, le=1e6)]
_Cost = Annotated[list[_Seconds], Field(min_length=2, max_length=2)]
_Row = Annotated[list[Annotated[int, Field(ge=0, le=2**50)]], Field(min_length=3, max_length=3)]
MAX_ROWS: Final = 512
TELL_EVERY_ROUNDS: Final = 20
LINK_EVERY_ROUNDS: Final = 100
PROBE_BYTES: Final = 1 << 20
"""Bytes that a rank posts to measure a link: enough to make the burst of a token bucket negligible."""
KEPT: Final = 8
"""Number of newest passes whose medians are reported."""
REPEATS: Final = 3
"""Repetitions of each measurement: the least counts."""


class MeasuredCosts(Declared):
    """Costs of one rank, as (seconds, seconds a byte of the gradient); of the link a byte that this rank posts."""

    tensors: Annotated[list[_Row], Field(min_length=1, max_length=MAX_ROWS)]
    """(tensors, bytes, microseconds of the backward pass), in the order of the backward pass"""

    rest_s: _Seconds
    """seconds of a step without backward pass and waiting"""

    iteration_s: _Seconds
    """seconds from pass to pass with the present groups; 0: unknown"""

    groups: Annotated[int, Field(ge=1)]
    """number of present groups"""

    workers: Annotated[int, Field(ge=1, le=1 << 20)]
    """number of workers that exchange compressed gradients with each other"""

    algorithm: Algorithm
    divisible: bool
    ratio: Annotated[float, Field(ge=0, le=64)]
    """bytes of a compressed gradient for each of its own"""

    link: _Cost
    allreduce: _Cost
    compress_device: _Cost
    compress_cpu: _Cost
    decompress_device: _Cost
    decompress_cpu: _Cost
