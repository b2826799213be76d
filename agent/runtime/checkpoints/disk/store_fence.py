"""Keeps an older run, which may live on unseen, from publishing in a store beside a newer one: URL/fence/000000000017.

Each begin of a run, and each checkpoint before its manifest, takes the next number: an object with the run in it, which
is created only if there is none (S3: If-None-Match, GCS: generation 0). Whoever finds the newest number in a newer
run's hand is fenced; who does not know of it yet finds its own next number taken."""

from __future__ import annotations

from typing import Final

from atoll.agent.runtime.checkpoints.disk.store import Store
from atoll.errors import CheckpointError

FOLDER: Final = "fence"
_TRIES: Final = 32
_MAX_RUN_BYTES: Final = 32


class StoreFence:
    """Fence of one run in a store. Methods raise CheckpointError if the store does not answer."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._begun = False
        self.warning = ""
        """Why the store cannot fence, for people; empty where it can."""

    def advance(self, store: Store) -> int:
        """Take the next number, unless a newer run has one. Returns the newest run: this one, where it may go on."""
        if not self._begun:
            self._begin(store)
        if self.warning:
            return self._run
        for _ in range(_TRIES):
            number, newest = self._newest(store)
            if newest > self._run:
                return newest
            if store.create(_name(number + 1), f"{self._run}\n".encode()):
                after, newest = self._newest(store)
                if after == number + 1:  # else others went on meanwhile, and what was taken had been removed already
                    self._remove_before(store, number)
                    return newest
        raise CheckpointError(f"{store.url}: others took the next number of its fence {_TRIES} times")

    def newest_run(self, store: Store) -> int:
        """Return the newest run that has taken a number; 0 if none has."""
        return self._newest(store)[1]

    def _begin(self, store: Store) -> None:
        if not store.creates_atomically:
            self.warning = f"{store.url}: its backend has no conditional writes"
        else:
            number, newest = self._newest(store)
            name, content = _name(number + 1), f"{self._run}\n".encode()
            if newest <= self._run and store.create(name, content) and store.create(name, content):
                self.warning = f"{store.url} ignores the condition of conditional writes"
        self._begun = True

    def _newest(self, store: Store) -> tuple[int, int]:
        """The highest number, and the run that has it; zeros where there is none."""
        numbers = sorted((int(name) for name in store.names(FOLDER) if name.isdigit()), reverse=True)
        if not numbers:
            return 0, 0
        content = store.content(_name(numbers[0]), _MAX_RUN_BYTES).strip()
        if not content.isdigit():
            raise CheckpointError(f"{store.url}/{_name(numbers[0])} holds {content!r}, not a run number. Remove it")
        return numbers[0], int(content)

    def _remove_before(self, store: Store, number: int) -> None:
        for name in store.names(FOLDER):
            if name.isdigit() and int(name) < number:
                store.discard(f"{FOLDER}/{name}")


def _name(number: int) -> str:
    return f"{FOLDER}/{number:012d}"
