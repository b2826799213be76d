"""Fixtures of everything that starts workers: under tests/runtime and tests/strategies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from warm import WarmStock, stock_of_pytest
from zmq_agent import Start

torch.set_num_threads(1)  # several that wait for each other, beside other processes, spin most of their time away


@pytest.fixture(scope="session")
def stock() -> Iterator[WarmStock]:
    with stock_of_pytest() as used:
        yield used


@pytest.fixture(scope="session")
def start(stock: WarmStock) -> Start:
    """Starts workers that have torch imported already."""
    return stock.start
