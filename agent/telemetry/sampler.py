"""Reads the devices' gauges once a second, on a thread of its own: a driver in trouble can block whoever asks it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from atoll.agent.telemetry.gauges import Gauges
from atoll.v1.common_pb2 import DeviceSample

logger = logging.getLogger(__name__)

SAMPLE_S: Final = 1.0
_STOP_S: Final = 2.0


class Sampler:
    """`take` never waits. The thread ends with the `with` block."""

    def __init__(self, gauges: Gauges, every_s: float = SAMPLE_S) -> None:
        self._gauges, self._every_s = gauges, every_s
        self._newest: Sequence[DeviceSample] = ()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # A daemon: a driver that never answers must not keep the agent from ending.
        self._thread = threading.Thread(target=self._run, name="atoll-sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(timeout=_STOP_S)
        if self._thread.is_alive():
            logger.warning("the devices' driver did not answer within %.0f s; leaving without it", _STOP_S)

    def take(self) -> Sequence[DeviceSample]:
        """One sample for each device; none where nothing is newer than the last call."""
        with self._lock:
            newest, self._newest = self._newest, ()
        return newest

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                samples = self._gauges.read()
                with self._lock:
                    self._newest = samples
                self._closing.wait(self._every_s)
        finally:
            self._gauges.close()
