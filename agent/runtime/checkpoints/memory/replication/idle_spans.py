"""Learns from the last steps when training leaves the links alone within a step. Pure.

A span begins when an exchange of gradients has ended and ends when the next begins; spans are numbered within a step,
from its boundary, which lies in the first one. The bytes of a copy that leave within a span are limited to what
`plan_chunks` puts into it. The plan is made again in every span, for what is left of copy and span; so a span that
begins late, a copy that is ready late and a rate that has changed are in it. What does not fit waits."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from atoll.agent.runtime.checkpoints.memory.replication.path_model import CHUNKS_PER_WINDOW, PathModel
from atoll.planning.chunks import ChunksInput, plan_chunks

PROFILE_STEPS: Final = 20
"""Steps that make a profile, and before which there is none (Gemini, section 6.5: the first 20 steps)."""
_SPAN_QUANTILE: Final = 0.25
"""Quantile of a span's lengths that is expected: a copy that lasts too long costs more than one that is late."""
_MAX_SPANS: Final = 256
"""Spans of one step that are recorded."""


class IdleSpans:
    """Told when links become busy, idle, and when a step ends; times never go back."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=PROFILE_STEPS)
        self._now: list[float] = []  # spans of the step under way that are over
        self._profile: tuple[float, ...] | None = None
        self.idle_since_s: float | None = None
        """When the span under way began; None while links are busy."""

    def idle(self, at_s: float) -> None:
        if self.idle_since_s is None:
            self.idle_since_s = at_s

    def busy(self, at_s: float) -> None:
        if self.idle_since_s is None:
            return
        if len(self._now) < _MAX_SPANS:
            self._now.append(at_s - self.idle_since_s)
        self.idle_since_s = None

    def boundary(self) -> None:
        """A step ends. One in which links were not used tells nothing."""
        if self._now:
            self._steps.append(tuple(self._now))
            self._now = []
            self._profile = None

    def profile(self) -> tuple[float, ...]:
        """Return seconds of each span, from steps with the usual number of spans; empty before PROFILE_STEPS steps."""
        if self._profile is None:
            self._profile = self._made()
        return self._profile

    def expected_s(self) -> float | None:
        """Return how long the present span lasts from its beginning, if known."""
        profile, place = self.profile(), len(self._now)
        return profile[place] if place < len(profile) else None

    def is_longest(self) -> bool:
        """Return whether the present span is the longest of its step."""
        return self.expected_s() == max(self.profile(), default=None)

    def _made(self) -> tuple[float, ...]:
        if len(self._steps) < PROFILE_STEPS:
            return ()
        count, _ = Counter(map(len, self._steps)).most_common(1)[0]
        alike = [step for step in self._steps if len(step) == count]
        return tuple(sorted(spans)[int(_SPAN_QUANTILE * (len(alike) - 1))] for spans in zip(*alike, strict=True))


USABLE_SHARE: Final = 0.9
"""Share of a span in which copies leave: mu of Gemini's Algorithm 6.2."""
_OVERDUE_FACTOR: Final = 2.0
"""Times its expected length after which a span is not one of a step: training does something else."""
_OVERDUE_S: Final = 0.05
"""Seconds by which it must also be longer."""
_NO_LIMIT: Final = 1 << 62
"""Bytes: more than any copy has."""


def overdue(spans: IdleSpans, now_s: float) -> bool:
    """Return whether links are idle for longer than ever within a step."""
    expected_s = spans.expected_s()
    if spans.idle_since_s is None or expected_s is None:
        return False
    return now_s - spans.idle_since_s > _OVERDUE_FACTOR * expected_s + _OVERDUE_S


def allowance(spans: IdleSpans, path: PathModel, left_bytes: int, now_s: float) -> int:
    """Bytes, of the `left_bytes` of a copy, for which what is left of this span suffices; 0 while links are busy.

    Without limit as long as nothing is known of spans or link. One chunk in a step's longest span always, so that a
    copy gets on where training leaves no time at all."""
    if spans.idle_since_s is None:
        return 0
    expected_s = spans.expected_s()
    if expected_s is None or path.bandwidth is None or overdue(spans, now_s):
        return _NO_LIMIT
    usable_s = max(USABLE_SHARE * expected_s - (now_s - spans.idle_since_s), 0.0)
    chunk_bytes = path.chunk_bytes
    could_bytes = int(usable_s * path.bandwidth) + chunk_bytes
    plan = plan_chunks(
        ChunksInput(
            idle_spans=(usable_s, 0.0),  # this one; what is put into the last, whatever its length, has to wait
            checkpoint_bytes=min(left_bytes, could_bytes),
            replicas=2,  # holders come one after the other
            buffers=CHUNKS_PER_WINDOW,
            buffer_bytes=CHUNKS_PER_WINDOW * chunk_bytes,
            bandwidth=path.bandwidth,
            alpha=path.alpha_s,
            mu=1.0,  # of the whole span, and taken off above
        )
    )
    fits = sum(chunk.bytes for chunk in plan.chunks if chunk.span == 0)
    return max(fits, chunk_bytes) if spans.is_longest() else fits
