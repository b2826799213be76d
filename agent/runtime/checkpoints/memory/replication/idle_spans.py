"""Learns from the last steps when training leaves the links alone within a step. Pure.

A span begins when an exchange of gradients has ended and ends when the next begins; spans are numbered within a step,
from its boundary, which lies in the first one."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

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
