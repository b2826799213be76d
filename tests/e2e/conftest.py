from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # for warm
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster
from shared_cluster import SharedCluster
from warm import stock_of_pytest


@pytest.fixture(scope="session", autouse=True)
def forked_daemons() -> Iterator[None]:
    """Fork controllers and agents of clusters: they, and workers, have torch and Atoll imported."""
    with stock_of_pytest() as Cluster.stock:
        yield


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An empty cluster; the test starts what it needs."""
    with Cluster(tmp_path) as started:
        yield started


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    cluster = SharedCluster(lambda: tmp_path_factory.mktemp("shared"), [1.0, 0.5])
    yield cluster
    cluster.close()


@pytest.fixture
def pair(shared: SharedCluster) -> Iterator[Cluster]:
    """A cluster without jobs, that other tests use too: whole again when the test ends. The second of its two agents is
    half as fast."""
    yield shared.whole()
    shared.after_test()


@pytest.fixture(scope="module")
def shared_trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    cluster = SharedCluster(lambda: tmp_path_factory.mktemp("shared"), [1.0, 1.0, 1.0])
    yield cluster
    cluster.close()


@pytest.fixture
def trio(shared_trio: SharedCluster) -> Iterator[Cluster]:
    """As `pair`, of three equal agents."""
    yield shared_trio.whole()
    shared_trio.after_test()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))
