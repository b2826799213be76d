"""Real etcd for the controller's tests: one server for all, emptied for each test, or one of a test's own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for etcd_server

from etcd_server import EtcdServer

from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.store import DeletePrefix

CALL_S = 30.0
"""Of calls to an etcd that is there: on a busy machine it may take long to write."""


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """The server behind `etcd`. Never stopped by a test."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> str:
    """HOST:PORT of a real etcd without keys. Its revisions go on from test to test."""
    store = EtcdStore([etcd_server.endpoint], None, timeout_s=CALL_S)
    await store.commit([DeletePrefix("/")])
    await store.close()
    return etcd_server.endpoint


@pytest.fixture
async def store(etcd: str) -> AsyncIterator[EtcdStore]:
    opened = EtcdStore([etcd], None, timeout_s=CALL_S)
    yield opened
    await opened.close()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd that the test may kill and start again."""
    server = EtcdServer(tmp_path / "own-etcd")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_store(own_etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    """A store on `own_etcd`."""
    opened = EtcdStore([own_etcd.endpoint], None, timeout_s=10)  # what a call to a killed one takes, too
    yield opened
    await opened.close()
