"""Measures what a volunteer's link carries and how long its device waits for it, and decides what follows: a coarser
form, or to wait.

Of the time in which a client has tasks, it told how long it computed; the rest it waited for its link (or its owner's
limit of that). So computing / all is the part of its power that it adds, which would be all of it without a network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from humanize import naturalsize

from atoll.agent.runtime.rounding import FORMS, Form, bytes_per_entry

WORTH: Final = 0.7
"""Part of its power that a volunteer adds; of less a coarser form is tried, then it waits."""
JUDGED_BYTES: Final = 256 << 10
"""Smallest gradient that a link is judged by: below it, turns of threads and processes take as long as links do."""
MEASURED: Final = 2
"""Answers, before a coarser form is tried."""
MEASURED_LONG: Final = 8
"""Answers, before anybody waits: the first of a step waits for weights, too, and others do not."""
REST_S: Final = 60.0
"""Pause before a volunteer is measured again, in seconds; doubled each time."""
LONGEST_REST_S: Final = 960.0
LEAST_BYTES_S: Final = 100_000.0
"""A link of less is none: how long is waited for the first answer of a client."""
LONGEST_TRAVEL_S: Final = 120.0
_GAIN: Final = 0.1
_UNDER_WAY: Final = 64  # more than a client that answers ever has


@dataclass(frozen=True, slots=True)
class PerAnswer:
    """Smoothed means. answers: measured in this form."""

    form: Form = "float32"
    answers: int = 0
    computed_s: float = 0.0
    waited_s: float = 0.0
    to_bytes: float = 0.0
    from_bytes: float = 0.0

    def learned(self, computed_s: float, waited_s: float, to_bytes: int, from_bytes: int) -> PerAnswer:
        gain = max(_GAIN, 1 / (self.answers + 1))
        return replace(
            self,
            answers=self.answers + 1,
            computed_s=self.computed_s + gain * (computed_s - self.computed_s),
            waited_s=self.waited_s + gain * (waited_s - self.waited_s),
            to_bytes=self.to_bytes + gain * (to_bytes - self.to_bytes),
            from_bytes=self.from_bytes + gain * (from_bytes - self.from_bytes),
        )

    def adds(self, times_as_long: float = 1.0) -> float:
        """The part of its power, 0..1, where what it waits for would take so many times as long."""
        all_s = self.computed_s + times_as_long * self.waited_s
        return self.computed_s / all_s if all_s else 1.0


@dataclass(frozen=True, slots=True)
class LinkVerdict:
    """form: from now on; None: it is to wait."""

    form: Form | None
    why: str


def decide(seen: PerAnswer, coarsest: Form, model_bytes: int) -> LinkVerdict | None:
    """Return the verdict from the measurements; None: no change. coarsest: form that may be tried. model_bytes: of
    its gradient in float32."""
    adds = seen.adds()
    if seen.answers < MEASURED or model_bytes < JUDGED_BYTES or adds >= WORTH:
        return None
    ways = f"{naturalsize(seen.to_bytes)} to it and {naturalsize(seen.from_bytes)} from it as {seen.form}"
    why = (
        f"an answer takes its link {seen.waited_s:.2g} s beside {seen.computed_s:.2g} s of computing ({ways}), so it "
        f"adds {100 * adds:.0f} % of its power, and at least {100 * WORTH:.0f} % are wanted"
    )
    here = bytes_per_entry(seen.form)
    coarser = [form for form in FORMS if FORMS.index(seen.form) < FORMS.index(form) <= FORMS.index(coarsest)]
    enough = [form for form in coarser if seen.adds(bytes_per_entry(form) / here) >= WORTH]
    if coarser:
        return LinkVerdict((enough or coarser[-1:])[0], why)
    if seen.answers < MEASURED_LONG:
        return None
    if coarsest == FORMS[-1]:
        return LinkVerdict(None, f"{why}. More samples a task (fewer micro_batches) or a thicker link would help")
    would = seen.adds(bytes_per_entry(FORMS[-1]) / here)
    return LinkVerdict(None, f'{why}. Setting thin_links = "{FORMS[-1]}" might make that {100 * would:.0f} %')


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    sent_s: float
    size_bytes: int
    form: Form
    all_weights: bool


@dataclass(slots=True)
class LinkUse:
    """Use of one volunteer's link. Times are monotonic; bytes since it first helped."""

    number: int
    seen: PerAnswer = PerAnswer()
    to_bytes: int = 0
    from_bytes: int = 0
    wait_share: float = 0.0
    """0..1, of its time with tasks, as measured last."""
    differs: float = 0.0
    """Largest difference of an answer that counted from the server's own, of its size."""
    rests_until_s: float = 0.0
    _rests: int = 0
    _begins: bool = False  # a coarse form: all the weights are sent in full, once
    _arrived_s: float = 0.0
    _under_way: dict[int, _OnItsWay] = field(default_factory=dict)

    def travel_s(self, model_bytes: int) -> float:
        """Return how long a task may take beside computing before its client counts as gone: weights to it and a
        gradient from it, over the thinnest link until measurements exist."""
        if model_bytes < JUDGED_BYTES:
            return 0.0
        if self.seen.answers:
            return 2 * self.seen.waited_s
        return min(LONGEST_TRAVEL_S, 2 * model_bytes / LEAST_BYTES_S)

    def sent(self, task: int, size_bytes: int, form: Form, now_s: float, *, all_weights: bool) -> None:
        self.to_bytes += size_bytes
        self._under_way[task] = _OnItsWay(now_s, size_bytes, form, all_weights)
        while len(self._under_way) > _UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]

    def arrived(self, task: int, size_bytes: int, computed_s: float, now_s: float) -> Form:
        """An answer, counting or not. computed_s: as the client says, which moves nobody's measure but its own. Returns
        what it came as. Not measured are others than of the present form, and the one that began a coarse form, which
        takes all the weights once."""
        self.from_bytes += size_bytes
        sent = self._under_way.pop(task, None)
        if sent is None:
            return self.seen.form
        all_s = now_s - max(sent.sent_s, self._arrived_s)
        self._arrived_s = now_s
        if sent.form != self.seen.form or not 0 <= computed_s < math.inf:  # NaN too
            return sent.form
        begins, self._begins = self._begins, False
        if not (begins and sent.all_weights):
            computed_s = min(computed_s, all_s)
            self.seen = self.seen.learned(computed_s, all_s - computed_s, sent.size_bytes, size_bytes)
            self.wait_share = 1 - self.seen.adds()
        return sent.form

    def start_again(self) -> None:
        """Another process of the same device: what was under way is lost, what was learned holds."""
        self._under_way.clear()
        self._arrived_s, self._begins = 0.0, self.seen.form != "float32"

    def take_form(self, form: Form) -> None:
        self.seen, self._begins = PerAnswer(form), True

    def rest(self, now_s: float) -> float:
        """Pause the volunteer, to measure it again after that. Return the seconds."""
        rest_s = min(LONGEST_REST_S, REST_S * (1 << min(self._rests, 16)))
        self._rests += 1
        self.rests_until_s = now_s + rest_s
        self.seen = PerAnswer(self.seen.form)
        self.start_again()
        return rest_s
