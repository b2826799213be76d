"""Measures how long a step took, how much of it was which work and how much waiting, for the estimators.

Marks are set where the phases of a step meet. On a CPU a mark is the host's time. A GPU works behind the host's back:
there a mark is an event in its queue, and what lies between two marks is the device's own time. Those are read when the
device has come past them, a step or so later, so that nobody waits for being measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from atoll.agent.runtime.session.throttle import Throttle

_PHASES: Final = 4  # load, forward, backward, update


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. step: from one boundary to the next; compute: without waiting for others and without the boundary's
    own work (checkpoints); wait: for collectives.

    load, forward, backward and update sum up to compute, or are all 0 where the script does not train one batch in one
    pass and what follows it; first_bucket is the backward pass until gradients could leave."""

    step: float
    compute: float
    wait: float
    load: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    first_bucket: float = 0.0
    update: float = 0.0


class Mark(Protocol):
    """A moment of the device that trains."""

    def since(self, earlier: Mark, /) -> float:
        """Seconds between them, both by the same maker. Waits until the device has come here."""

    def reached(self) -> bool:
        """Return True if the device has passed the mark."""


MarkMaker = Callable[[], Mark]


@dataclass(frozen=True, slots=True)
class HostMark:
    at_s: float

    def since(self, earlier: Mark, /) -> float:
        assert isinstance(earlier, HostMark)
        return self.at_s - earlier.at_s

    def reached(self) -> bool:
        return True


class DeviceMark:
    """Mark in the stream that is current where the mark is made."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def since(self, earlier: Mark, /) -> float:
        assert isinstance(earlier, DeviceMark)
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


def host_mark() -> HostMark:
    return HostMark(time.monotonic())


def marks_of(device: torch.device) -> MarkMaker:
    return DeviceMark if device.type == "cuda" else host_mark


class Lap:
    """One step on its way. `times` may be asked once it has ended."""

    __slots__ = ("_bucket", "_end", "_marks", "_step_s", "_updated", "_waits_s", "_whole", "begun_s", "boundary_wait_s")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.boundary_wait_s = 0.0
        self._marks: list[Mark] = []  # where boundary, load, forward and backward ended
        self._waits_s: list[float] = []  # for others, in what follows each mark
        self._bucket: Mark | None = None
        self._updated = False
        self._whole = True  # no phase was left out, came twice or began unseen
        self._end: Mark | None = None
        self._step_s = 0.0

    def phase_ends(self, number: int, mark: Mark, *, seen: bool = True) -> None:
        """number: how many ended before it. seen: whether it ended here and not some time ago."""
        self._whole = self._whole and seen and number == len(self._marks)
        if self._whole or number == 0:
            self._marks.append(mark)
            self._waits_s.append(0.0)

    def bucket_ready(self, make: MarkMaker) -> None:
        if self._bucket is None:
            self._bucket = make()

    def waited(self, seconds: float) -> None:
        if self._waits_s:
            self._waits_s[-1] += seconds

    def updated(self) -> None:
        self._updated = True

    def end(self, now_s: float, mark: Mark) -> None:
        self._end, self._step_s = mark, now_s - self.begun_s

    def measured(self) -> bool:
        """Return True if `times` needs no wait for the device."""
        return self._end is not None and self._end.reached()

    def times(self) -> StepTimes:
        assert self._end is not None
        ends = [*self._marks[1:], self._end] if self._marks else []
        spans_s = [end.since(begin) for begin, end in zip(self._marks, ends, strict=True)]
        wait_s = sum(self._waits_s)
        if self._whole and len(spans_s) == _PHASES and self._updated:
            # A host that waited may have kept no device from working: never below 0.
            parts = [max(span_s - one_s, 0.0) for span_s, one_s in zip(spans_s, self._waits_s, strict=True)]
            bucket_s = self._bucket.since(self._marks[2]) if self._bucket is not None else 0.0
            load, forward, backward, update = parts
            bucket_s = min(max(bucket_s, 0.0), backward)
            wait_s += self.boundary_wait_s
            return StepTimes(self._step_s, sum(parts), wait_s, load, forward, backward, bucket_s, update)
        return StepTimes(self._step_s, max(sum(spans_s) - wait_s, 0.0), wait_s + self.boundary_wait_s)


class StepClock:
    """Measures from `boundary_ends` to `boundary_begins`, and from one `boundary_begins` to the next. In between come
    `handed_out`, `backward_begins`, `backward_ends` and `updated`.

    A worker that is slowed down on purpose sleeps at these marks, and where `pay` is called."""

    def __init__(
        self,
        mark: MarkMaker = host_mark,
        now_s: Callable[[], float] = time.monotonic,
        throttle: Throttle | None = None,
    ) -> None:
        self._mark, self._now_s = mark, now_s
        self._throttle = throttle if throttle is not None and throttle.slows else None
        self._lap = Lap(now_s())

    def pay(self) -> None:
        """Stretch the computing since the last mark."""
        if self._throttle is not None:
            self._throttle.pay()

    def waited(self, seconds: float, *, at_boundary: bool = False) -> None:
        """Count seconds of waiting for others. at_boundary: between `boundary_begins` and `boundary_ends`."""
        if at_boundary:
            self._lap.boundary_wait_s += seconds
            return
        self._lap.waited(seconds)
        if self._throttle is not None:
            self._throttle.waited(seconds)

    def boundary_begins(self) -> Lap:
        """Return the step that ends; the next step begins here."""
        ended, now_s = self._lap, self._now_s()
        ended.end(now_s, self._mark())
        self._lap = Lap(now_s)
        return ended

    def boundary_ends(self) -> None:
        """Mark the end of the boundary's own work."""
        self._lap.phase_ends(0, self._mark())
        self._resume()

    def handed_out(self) -> None:
        """Mark that the script gets its batch."""
        self.pay()
        self._lap.phase_ends(1, self._mark())

    def backward_begins(self, *, seen: bool) -> None:
        """Mark the begin of a backward pass. seen: it begins here, and is the only one of its update."""
        self.pay()
        self._lap.phase_ends(2, self._mark(), seen=seen)

    def bucket_ready(self) -> None:
        """Mark that gradients could leave. The first of a step counts."""
        self.pay()
        self._lap.bucket_ready(self._mark)

    def backward_ends(self) -> None:
        """Mark the end of a backward pass. If the strategy is synchronous, the combined gradients are there."""
        self._lap.phase_ends(3, self._mark())
        self._resume()

    def _resume(self) -> None:
        if self._throttle is not None:
            self._throttle.resume()

    def updated(self) -> None:
        """Note that optimizer.step() is done."""
        self._lap.updated()
