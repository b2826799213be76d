"""Times of a pass's reductions, measured where they end: nobody waits or polls for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.agent.runtime.step.measures.clock import Mark, MarkMaker


class ExchangeTimes:
    """Marks of one pass. Launches come in order on the training thread; ends come in any order on any thread.

    torch calls back when a collective ends: gloo on its own thread and before anyone who waits for it goes on, NCCL at
    once, with a current stream that follows the collective, so that an event made there is its end."""

    def __init__(self, make: MarkMaker, quiet: Callable[[], None] = lambda: None) -> None:
        """quiet: told when one ends and no other is under way, on the thread where it ends."""
        self._make, self._quiet = make, quiet
        self._launches: list[Mark] = []
        self._ends: list[Mark | None] = []
        self._expected = False

    def begin(self) -> None:
        """Forget the times of an earlier pass. Ends of it that come later change nothing here."""
        self._launches, self._ends = [], []

    def expect(self) -> None:
        """The next one follows at once: until it is launched, links are not quiet."""
        self._expected = True

    def launching(self) -> Callable[[object], None]:
        """The next all-reduce is being launched. Returns what is to be called when it ends."""
        self._launches.append(self._make())
        self._ends.append(None)
        self._expected = False
        return partial(self._ended, self._ends, len(self._ends) - 1)

    def _ended(self, ends: list[Mark | None], number: int, _: object) -> None:
        ends[number] = self._make()
        if not self._expected and None not in ends:
            self._quiet()

    def take(self) -> tuple[float, float]:
        """Seconds of all all-reduces but the last, and of the last. (0, 0) where one has not ended.

        Each counts from when it could begin, which is its launch or the end of all before it; together they are the
        time in which at least one was under way."""
        launches, ends = self._launches, self._ends
        self.begin()
        took_s, free_s = [], 0.0
        for launch, end in zip(launches, ends, strict=True):
            if end is None:
                return 0.0, 0.0
            begin_s, end_s = max(launch.since(launches[0]), free_s), end.since(launches[0])
            took_s.append(max(end_s - begin_s, 0.0))
            free_s = max(free_s, end_s)
        return (sum(took_s[:-1]), took_s[-1]) if took_s else (0.0, 0.0)
