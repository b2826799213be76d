"""Measurements for Prometheus, served over HTTP where an address is given: each scrape asks the daemon's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from atoll.errors import BadInput, SettingError
from atoll.network.rpc import is_loopback, split_address

SCRAPE_S: Final = 5.0
"""Seconds that a scrape waits for the event loop."""
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """A name by Prometheus' conventions, and what it measures. A counter's name ends with _total."""

    name: str
    what: str
    labels: tuple[str, ...] = ()


Measured = tuple[Measurement, float, tuple[str, ...]]
"""Measurement with its value and its labels' values, in their order."""


_NO_PORT: Final = 1
"""Port without a server."""


def check_address(setting: str, address: str, *, insecure: bool = False) -> None:
    """Raises SettingError where others than this machine could read it unasked, BadInput for what is no address."""
    host, port = split_address(address, _NO_PORT)
    if port == _NO_PORT:
        raise SettingError(setting, address, "names no port", "Give HOST:PORT, e.g. 127.0.0.1:9701")
    if not is_loopback(host) and not insecure:
        why = "is reachable from other machines, and whoever reaches it reads names of jobs and what they report"
        raise SettingError(setting, address, why, "Use 127.0.0.1, with Prometheus or an agent of it on this machine")


@asynccontextmanager
async def exposed(address: str | None, look: Callable[[], Iterable[Measured]]) -> AsyncIterator[str]:
    """Serves /metrics while inside; gives its URL, empty where there is no address. look: called on the event loop.
    Raises SettingError for a port that is in use, BadInput where prometheus-client is not installed."""
    if address is None:
        yield ""
        return
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    except ModuleNotFoundError as error:
        missing = "prometheus-client, which is not installed: pip install prometheus-client"
        raise BadInput(f"--metrics needs {missing}") from error
    host, port = split_address(address)
    registry = CollectorRegistry()
    registry.register(_Looking(asyncio.get_running_loop(), look))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        why = "cannot be listened on: the port is in use, or the address is not this machine's"
        raise SettingError("metrics", address, why, "Choose another with --metrics") from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        await asyncio.to_thread(server.shutdown)  # a scrape under way waits for the event loop
        server.server_close()
        thread.join(_CLOSE_S)


class _Looking:
    """A collector, used by the server's threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], Iterable[Measured]]) -> None:
        self._loop, self._look = loop, look

    def describe(self) -> Iterable[Any]:
        return ()  # nothing is asked of the daemon when this is registered

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        async def looked() -> list[Measured]:
            return list(self._look())

        found = asyncio.run_coroutine_threadsafe(looked(), self._loop).result(SCRAPE_S)
        families: dict[str, Any] = {}
        for measurement, value, labels in found:
            name = measurement.name
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = kind(name, measurement.what, labels=measurement.labels)
            families[name].add_metric(labels, value)
        yield from families.values()
