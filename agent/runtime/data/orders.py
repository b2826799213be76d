"""The order of an epoch's samples: by number, by a sampler of the script's, or as a stream gives them.

An order is the same on every rank. So each works out alone which samples are its own, at any split and after any
resume, and a position in it is free of ranks."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import blake2b
from typing import Any, Final, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset

from atoll.errors import BadInput

_NUMPY: Final = "numpy"


class Order(Protocol):
    """Source of sample positions, from which a BatchSlicer cuts batches."""

    @property
    def samples(self) -> int | None:
        """Samples of the newest epoch; None until its end if that is not known before."""
        return None

    def read_length(self) -> int | None:
        """Return the samples of an epoch that would begin now; None where that shows at its end only."""
        return None

    def begin(self, epoch: int, consumed: int) -> None:
        """An iteration begins at this position. Raises BadInput where the samples do not fit it."""
        return

    def restore(self, epoch: int, samples: int) -> None:
        """A checkpoint says how many samples this epoch has, which goes on here."""
        return

    def left(self, epoch: int, consumed: int, most: int) -> int:
        """Return the number of samples after `consumed`; if that takes reading, at most `most` are read."""

    def cut(self, epoch: int, consumed: int, most: int) -> int:
        """Return the size of the next batch: `most`, or less if fewer samples are left."""

    def indices(self, epoch: int, begin: int, end: int) -> list[Any]:
        """Return the dataset's indices at positions [begin, end), which `left` has found."""

    def completed(self, epoch: int, consumed: int) -> None:
        """Training has come to this position."""
        return

    def digest(self) -> int:
        """Return a hash below 2^63, equal on ranks with the same order."""


class EpochOrder(Order):
    """Order of a dataset with a length, a function of (seed, epoch, length). The length is read when an epoch
    begins."""

    def __init__(
        self, length: Callable[[], int], seed: int, shuffle: bool, sampler: Iterable[Any] | None = None
    ) -> None:
        """length: of the dataset, now. sampler: in place of all samples once, shuffled or not. Raises BadInput where it
        has no length."""
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler
        self._epoch = -1
        self._order: torch.Tensor | list[Any] = []  # int64 [samples]; of a sampler what it gives
        self._length = length if sampler is None else lambda: _length(sampler)
        self._what = "dataset" if sampler is None else type(sampler).__name__
        self._samples = self._length()
        self._begun = -1  # the epoch that has `_samples`

    @property
    def samples(self) -> int:
        return self._samples

    def read_length(self) -> int:
        return self._length()

    def restore(self, epoch: int, samples: int) -> None:
        self._begun, self._samples, self._epoch = epoch, samples, -1

    def begin(self, epoch: int, consumed: int) -> None:
        _tell_epoch(self._sampler, epoch)
        samples = self._length()
        if consumed and epoch == self._begun and samples != self._samples:
            raise BadInput(
                f"the {self._what} has {samples} samples in the middle of epoch {epoch}, which began with "
                f"{self._samples}. Change its length between two epochs only; after a resume give it the length of the "
                "epoch that goes on, before the loop over the loader"
            )
        if consumed > samples:
            raise BadInput(
                f"training has come to sample {consumed} of epoch {epoch}, and the {self._what} has {samples}. Was the "
                "checkpoint of another?"
            )
        if (epoch, samples) != (self._begun, self._samples):
            self.restore(epoch, samples)

    def left(self, epoch: int, consumed: int, most: int) -> int:
        return max(0, self._samples - consumed)

    def cut(self, epoch: int, consumed: int, most: int) -> int:
        return min(most, self.left(epoch, consumed, most))

    def indices(self, epoch: int, begin: int, end: int) -> list[Any]:
        if epoch != self._begun:
            self._refuse_other_length(epoch)
        if not self._shuffle and self._sampler is None:
            return list(range(begin, end))
        if epoch != self._epoch:
            seed = mixed_seed(self._seed, epoch)
            self._order = self._sampled(seed, epoch) if self._sampler is not None else self._shuffled(seed)
            self._epoch = epoch
        chosen = self._order[begin:end]
        return chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen

    def _refuse_other_length(self, epoch: int) -> None:
        """An engine of its own cuts batches of this epoch without `begin`."""
        if (samples := self._length()) != self._samples:
            raise BadInput(
                f"the {self._what} has {samples} samples in epoch {epoch} and had {self._samples} at "
                "run.prepare_pipeline, where the strategy counts the updates of all epochs. Keep its length"
            )
        self._begun = epoch

    def digest(self) -> int:
        if self._sampler is None:
            return 0  # of the seed, which is compared by itself
        return _digest(self.indices(0, 0, self._samples))

    def _shuffled(self, seed: int) -> torch.Tensor:
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(seed))

    def _sampled(self, seed: int, epoch: int) -> list[Any]:
        sampler = self._sampler
        assert sampler is not None
        _tell_epoch(sampler, epoch)
        if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
            own.manual_seed(seed)
        generators = Generators(seed)
        with generators.in_place_of_global():
            order = list(sampler)
        if len(order) != self._samples:
            raise BadInput(
                f"the {type(sampler).__name__} gave {len(order)} samples in epoch {epoch} and says len() = "
                f"{self._samples}. Both have to agree, or workers would end the epoch apart"
            )
        return order


class StreamOrder(Order):
    """Order of an iterable dataset. Every rank reads all of it and keeps its own parts.

    Read samples stay until training has passed them, so that a step can be cut again with other shares. To go back
    further, the stream is read again from its last saved state, or from its start if it has none. Random numbers
    that it draws depend on (seed, epoch), not on the rank."""

    def __init__(self, stream: Iterable[Any], seed: int) -> None:
        self._stream, self._seed = stream, seed
        self.stateful = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        self._initial = deepcopy(stream.state_dict()) if self.stateful else None  # type: ignore[attr-defined]
        self._generators = Generators(mixed_seed(seed, 0))
        self._iterator: Iterator[Any] = iter(())
        self._epoch = -1  # that is being read
        self._first = 0  # position of the first sample in the buffer
        self._buffer: deque[Any] = deque()
        self._ended = self._iterated = False
        self._stands = self._stood = (0, 0)  # (epoch, consumed) that training has come to; the batch before
        # Of the stream, by (epoch, consumed). None where it had ended: what it then says may be its start.
        self._states: dict[tuple[int, int], Any] = {}

    def left(self, epoch: int, consumed: int, most: int) -> int:
        self._go_to(epoch, consumed)
        self._read(consumed + most)
        return min(most, self._first + len(self._buffer) - consumed)

    def cut(self, epoch: int, consumed: int, most: int) -> int:
        count = self.left(epoch, consumed, most)
        end = consumed + count
        if self.stateful and end == self._first + len(self._buffer):
            state = None if self._ended else self._stream.state_dict()  # type: ignore[attr-defined]
            self._states[epoch, end] = deepcopy(state)
            # Who goes on from that state draws what this rank draws from here on.
            self._generators = Generators(mixed_seed(self._seed, epoch, end))
        return count

    def indices(self, epoch: int, begin: int, end: int) -> list[Any]:
        self._go_to(epoch, begin)
        self._read(end)
        return [self._buffer[at - self._first] for at in range(begin, end)]

    def completed(self, epoch: int, consumed: int) -> None:
        """Drop the samples before the end of this completed batch."""
        if (epoch, consumed) == self._stands:
            return
        self._stood, self._stands = self._stands, (epoch, consumed)
        if self._stood[0] == self._epoch:
            self._read(self._first + len(self._buffer), keep_from=self._stood[1])
        oldest = min(self._reached(), default=self._stands)
        self._states = {at: state for at, state in self._states.items() if at >= oldest}

    def digest(self) -> int:
        """Return a hash of the first sample: a stream that gives each rank its own part would lose samples here."""
        return _digest(self.indices(0, 0, self.left(0, 0, 1)))

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state at the trained position and one batch before, which a resume at an epoch's end
        yields again."""
        reached = self._reached()
        return {"positions": [list(at) for at in reached], "states": [deepcopy(self._states[at]) for at in reached]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        known = {(at[0], at[1]): one for at, one in zip(state["positions"], state["states"], strict=True)}
        self._states.update(known)
        if known and self._stands == (0, 0):
            self._stood, self._stands = min(known), max(known)

    def _reached(self) -> list[tuple[int, int]]:
        """Return the positions of the two newest known states that training has passed."""
        return sorted(at for at in self._states if at <= self._stands)[-2:]

    def _go_to(self, epoch: int, consumed: int) -> None:
        """The sample at `consumed` is in the buffer, or the next to be read."""
        if epoch != self._epoch or consumed < self._first:
            self._begin(epoch, consumed)
        if consumed > self._first + len(self._buffer):
            self._read(consumed, keep_from=consumed)
            if self._first < consumed:
                raise BadInput(
                    f"the stream ends after {self._first} samples, and training has come to number {consumed} of epoch "
                    f"{epoch}. Was the checkpoint of another stream?"
                )

    def _begin(self, epoch: int, consumed: int) -> None:
        """Iterates anew, from the state that is nearest below `consumed`, or from the start."""
        start = max((at for at in self._states if at[0] == epoch and at[1] <= consumed), default=None)
        self._generators = Generators(mixed_seed(self._seed, epoch, *(start or (epoch, 0))[1:]))
        _tell_epoch(self._stream, epoch)
        ended = start is not None and self._states[start] is None
        if not ended:
            if start is not None:
                self._stream.load_state_dict(deepcopy(self._states[start]))  # type: ignore[attr-defined]
            elif self.stateful and self._iterated and not self._ended:
                self._stream.load_state_dict(deepcopy(self._initial))  # type: ignore[attr-defined]
            with self._generators.in_place_of_global():
                self._iterator = iter(self._stream)
            self._iterated = True
        self._epoch, self._first, self._ended = epoch, start[1] if start else 0, ended
        self._buffer.clear()

    def _read(self, end: int, keep_from: int = 0) -> None:
        """Read up to `end`, or to the stream's end. Drop samples before `keep_from`."""
        if not self._ended and self._first + len(self._buffer) < end:
            with self._generators.in_place_of_global():
                while not self._ended and self._first + len(self._buffer) < end:
                    self._drop(keep_from)
                    try:
                        self._buffer.append(next(self._iterator))
                    except StopIteration:
                        self._ended = True
        self._drop(keep_from)

    def _drop(self, before: int) -> None:
        while self._buffer and self._first < before:
            self._buffer.popleft()
            self._first += 1


class StreamedSamples(Dataset[Any]):
    """Dataset that stands for a stream in the workers that fetch batches: its indices are the samples themselves."""

    def __getitem__(self, sample: Any) -> Any:
        return sample

    def __getitems__(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples)


class Generators:
    """Random numbers of torch, Python and NumPy apart from the script's own."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: list[Any] = []

    @contextmanager
    def in_place_of_global(self) -> Iterator[None]:
        """Inside, who draws from the global ones draws from these, going on where the last time ended."""
        outside = _global_states()
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)
            random.seed(self._seed)
            if (numpy := sys.modules.get(_NUMPY)) is not None:
                numpy.random.seed(self._seed & 0xFFFFFFFF)
            self._seed = None
        else:
            _put_back(self._states)
        try:
            yield
        finally:
            self._states = _global_states()
            _put_back(outside)


def is_stream(dataset: object) -> bool:
    """Return True if the dataset can only be iterated."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not indexed)


def mixed_seed(*parts: int) -> int:
    """One generator seed from several numbers. torch's CPU generator uses the low 32 bits: they must be well mixed."""
    try:
        words = b"".join(part.to_bytes(9, "little", signed=True) for part in parts)
    except OverflowError as error:
        raise BadInput(f"a seed among {parts} is too large; it must be at least -2^64 and below 2^64") from error
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def _length(sampler: Iterable[Any]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise BadInput(f"the {type(sampler).__name__} has no length, which schedules and splits need") from error


def _tell_epoch(dataset: object, epoch: int) -> None:
    if (tell := getattr(dataset, "set_epoch", None)) is not None:
        tell(epoch)


def _global_states() -> list[Any]:
    numpy = sys.modules.get(_NUMPY)
    return [torch.default_generator.get_state(), random.getstate(), numpy.random.get_state() if numpy else None]


def _put_back(states: Sequence[Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules[_NUMPY].random.set_state(states[2])


def _digest(value: Any) -> int:
    hasher = blake2b(digest_size=7)
    for part in _parts(value):
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little")


def _parts(value: Any) -> Iterator[bytes]:
    """Yield a sample's content in order. An unknown type yields its name alone, since its repr may contain an
    address."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__}{len(value)}".encode()
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "tobytes"):  # NumPy's, and images
        yield value.tobytes()
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
