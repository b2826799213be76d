"""The engine of a sparse exchange: compresses, exchanges, sums, updates and publishes each tensor of a rank, on CPUs.

Native threads carry the work out as tasks of one queue, the earliest sync round and in it the layer that the next
forward pass needs first (earliest deadline first; StellaTrain, section 3.3). Python hands gradients in and moves the
messages between ranks; nothing here touches a network. A sync round is what all ranks exchange once.

1. `compress`: this rank's part of a tensor (sparse blocks, what is left out stays in the residual). It goes to all
   mates of the island.
2. Every member adds the island's parts in rank order and rounds the sum as the wire does, so all have the same bits.
   The leader, the lowest rank, sends it to the other islands. An island of one sends its part as its sum.
3. `apply` (or `accumulate`, under gradient accumulation): the islands' sums, in island order, go through the sparse
   optimizer into the float32 shared parameters, equal bit for bit on all ranks. The tensor's version is then the round.
4. `fetch`: the model's own weights get what changed, when a forward pass asks for it and never in between.

Any method may be called from any thread. Wrong arguments raise `BadInput` and change nothing. A lost peer, or a message
that cannot be decoded, fails the engine: `fetch` and `changes` then raise `PeerLost`, all else goes on, so that what
is there can be finished and saved. A forked child cannot use its parent's engine.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.errors import AtollError, DeadlineExceeded, PeerLost
from atoll.kernels import _native
from atoll.kernels.refusals import refusals

Rule = Literal["sgd", "nesterov", "adam", "adamw"]
Selection = Literal["threshold", "topk", "random"]
Exchange = Literal["gradients", "updates"]
Values = Literal["float32", "float16", "bfloat16", "int8", "int4", "int2"]
"""Format of values on the wire."""


class Outgoing(NamedTuple):
    """A message to send. kind: 0, this rank's part for its mates; 1, its island's sum for the other islands; 7, the
    same for the aggregator of the tensor; 8, the aggregator's total for everybody."""

    kind: int
    sync_round: int
    tensor: int
    order: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    """Blocks in the payload."""
    payload: bytes
    to: int
    """The rank that it is for; -1: all that messages of its kind are for."""


class Change(NamedTuple):
    """The changed blocks of a tensor: index uint32 [k], ascending, values float32 [k, 16], 0 beyond its end."""

    version: int
    index: NDArray[np.uint32]  # type: ignore[assignment]
    values: NDArray[np.float32]


class RecentPart(NamedTuple):
    """A part that this rank sent of a tensor, or, as its aggregator, a total (kind 8): index uint32 [k], values
    float32 [k, 16], after the wire's rounding."""

    kind: int
    sync_round: int
    tensor: int
    index: NDArray[np.uint32]  # type: ignore[assignment]
    values: NDArray[np.float32]


class EngineStats(NamedTuple):
    """Figures of a while. queue_s and stall_s are of wall clock; other seconds are processor time, of all threads
    together: the same however many want the processors."""

    tasks: int
    queue_s: float
    """Tasks waited so long in the queue, all of them together."""
    compress_s: float
    sum_s: float
    """Decoding what came, and adding it up."""
    update_s: float
    """The optimizer, and digests."""
    publish_s: float
    """Copying changed blocks to the live weights."""
    chosen_blocks: int
    """Of which parts were made."""
    found_blocks: int
    """Exceeded the threshold; what found no room stays in the residual."""
    all_blocks: int
    nonfinite_blocks: int
    """Held a NaN or an infinity and were dropped."""
    payload_bytes: int
    """Of the messages made, each counted once however many receivers it has."""
    stall_s: float
    """`fetch` and `changes` waited."""
    outstanding_squares: float
    """Exchanging updates, from a sample: the squared norm of what was not sent after each choice, added up."""
    update_squares: float
    """The same of what the optimizer did before it, since the choice before."""
    rounds: int
    """That all tensors are through."""
    rounds_s: float
    """They took so long, from the order of their update to the last tensor's; added up, of wall clock."""


class GradientEngine(_native.GradientEngine):
    """One rank's engine that exchanges gradients, which a sparse optimizer applies to the shared parameters.

    Its owner calls `close`. Other methods are described where they are declared (_native.pyi).

    islands: the ranks 0..N-1, each once, grouped by island. threads: 1..256 that work; each kernel runs on one.
    values: what a part's values are on the wire. selection: which blocks are sent; "random" needs the same `k_blocks`
    and seed on all ranks. digest_every: take `digests` after such rounds, 0: never. first_round: the first that will be
    exchanged; versions begin one below. error_feedback: what is not sent stays in the residual; without, it is lost."""


class UpdateEngine(_native.UpdateEngine):
    """One rank's engine that exchanges updates. Settings as of `GradientEngine`, and two of its own.

    Each rank makes its own full update in its live weights, `sum_updates` sends what it is ahead of the shared
    parameters, and `fetch` adds what the others did. The shared parameters take all ranks' updates, each times its
    `weight`, of which the sum over ranks is 1; at any time live = shared_param - residual / weight, so error feedback
    is in the weights themselves and needs no memory. Where a rank's weight changes, what it has not sent yet counts as
    the new one says. Moments, accumulation and clipping belong to each rank's own optimizer. What live weights of 16
    bits lose where others' updates are added is remembered, in float32 [n], and counts as if they had it.
    replicas: the ranks of an island are one replica with equal live weights: the leader alone sends and fetches, the
    others are added without live weights, and their shared parameters follow.
    every: only each so-many-th round of a tensor is exchanged, which is the tensor's `turn`; the others are counted and
    change nothing, so that a few tensors leave in every round."""


ExchangeEngine: TypeAlias = GradientEngine | UpdateEngine


class _refusals(refusals):
    __slots__ = ()

    def _translated(self, error: BaseException) -> AtollError | None:
        match error:
            case TimeoutError():
                return DeadlineExceeded(f"{self._name}: {error}")
            case ConnectionError():
                return PeerLost(str(error))
            case RuntimeError():
                return AtollError(f"{self._name}: {error}")
        return super()._translated(error)


_TYPED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "changes": lambda answer: (answer[0], [Change._make(row) for row in answer[1]]),
    "take_outgoing": lambda rows: [Outgoing._make(row) for row in rows],
    "recent_parts": lambda rows: [RecentPart._make(row) for row in rows],
    "take_stats": EngineStats._make,
}
"""By method, the type made of the tuples that the native one returns."""


def _translating(name: str, call: Callable[..., Any], finish: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a method whose errors are Atoll's. finish: takes what `call` returns."""

    @functools.wraps(call)
    def method(self: ExchangeEngine, *given: Any, **named: Any) -> Any:
        with _refusals(name):
            answer = call(self, *given, **named)
        return answer if finish is None else finish(answer)

    return method


def _translate(engine: type[Any]) -> None:
    """Make the errors of an engine's methods, and what they return, those of this module."""
    construct = engine.__init__

    @functools.wraps(construct)
    def __init__(self: ExchangeEngine, **settings: Any) -> None:
        with _refusals(engine.__name__):
            construct(self, **settings)
        _unclosed.add(self)

    engine.__init__ = __init__
    for name in [name for name in dir(engine) if not name.startswith("_")]:
        setattr(engine, name, _translating(name, getattr(engine, name), _TYPED.get(name)))


_translate(GradientEngine)
_translate(UpdateEngine)

_unclosed: Final[weakref.WeakSet[ExchangeEngine]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close engines before the interpreter ends: threads must not compute on memory that its end takes away."""
    for engine in list(_unclosed):
        engine.close()
