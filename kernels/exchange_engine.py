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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

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


class ExchangeEngine(_native.ExchangeEngine):
    """One rank's engine. Its owner calls `close`. Other methods are described where they are declared (_native.pyi).

    islands: the ranks 0..N-1, each once, grouped by island. threads: 1..256 that work; each kernel runs on one.
    values: what a part's values are on the wire. selection: which blocks are sent; "random" needs the same `k_blocks`
    and seed on all ranks. error_feedback: what is not sent stays in the residual; without, it is lost. digest_every:
    take `digests` after such rounds, 0: never. first_round: the first that will be exchanged; versions begin one below.
    exchange: "gradients", which a sparse optimizer applies to the shared parameters; or "updates": each rank makes its
    own full update in its live weights, `sum_updates` sends what it is ahead of the shared parameters, and `fetch` adds
    what the others did. The shared parameters take all ranks' updates, each times its `weight`, of which the sum over
    ranks is 1; at any time live = shared_param - residual / weight, so error feedback is in the weights themselves and
    needs no memory (pass error_feedback=False). Where a rank's weight changes, what it has not sent yet counts as the
    new one says. Moments, accumulation and clipping belong to each rank's own optimizer and are refused. What live
    weights of 16 bits lose where others' updates are added is remembered, in float32 [n], and counts as if they had it.
    replicas: exchanging updates, the ranks of an island are one replica with equal live weights: the leader alone sends
    and fetches, the others are added without live weights, and their shared parameters follow.
    every: only each so-many-th round of a tensor is exchanged, which is the tensor's `turn`; the others are counted and
    change nothing, so that a few tensors leave in every round. Exchanging updates alone.
    """

    if not TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            _unclosed.add(self)

    def changes(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[float, list[Change]]:
        """Wait as `fetch` does, for tensors without live; returns the seconds waited, and changed blocks of each.

        They are those that changed since the last call, with what shared_param holds there. Exchanging updates, the
        values are to be added to the live weights."""
        waited_s, rows = super().changes(tensors, sync_round, deadline_s)
        return waited_s, [Change._make(row) for row in rows]

    def take_outgoing(self, limit: int = 64) -> list[Outgoing]:
        """Return messages to send, the most urgent first."""
        return [Outgoing._make(row) for row in super().take_outgoing(limit)]

    def recent_parts(self) -> list[RecentPart]:
        """Return the parts, and as an aggregator the totals, that this rank sent in the newest rounds of each tensor.

        The oldest round is first: of 4, or as many as `remember` said."""
        return [RecentPart._make(row) for row in super().recent_parts()]

    def take_stats(self) -> EngineStats:
        """Return the figures since the last call."""
        return EngineStats._make(super().take_stats())


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


def _translating(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose errors are Atoll's."""

    @functools.wraps(call)
    def method(self: ExchangeEngine, *given: Any, **named: Any) -> Any:
        with _refusals(name):
            return call(self, *given, **named)

    return method


for _name in vars(_native.ExchangeEngine).keys() | {"__init__"}:
    if _name == "__init__" or not _name.startswith("_"):
        _call = getattr(ExchangeEngine, _name)
        setattr(ExchangeEngine, _name, _translating(_name.replace("__init__", "ExchangeEngine"), _call))


_unclosed: Final[weakref.WeakSet[ExchangeEngine]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close engines before the interpreter ends: threads must not compute on memory that its end takes away."""
    for engine in list(_unclosed):
        engine.close()
