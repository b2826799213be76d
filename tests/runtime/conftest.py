from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for zmq_agent and warm

from warm import WarmStock
from zmq_agent import Start


@pytest.fixture(scope="session")
def stock() -> Iterator[WarmStock]:
    with WarmStock() as started:
        yield started


@pytest.fixture(scope="session")
def start(stock: WarmStock) -> Start:
    """Starts workers that have torch imported already."""
    return stock.start
