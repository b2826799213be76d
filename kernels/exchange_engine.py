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

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.errors import AtollError, DeadlineExceeded, PeerLost
from atoll.kernels import _native
from atoll.kernels.compress import Selection as Counted
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


def _forwarded(name: str) -> Callable[..., Any]:
    method = getattr(_native.ExchangeEngine, name)

    def call(self: ExchangeEngine, *arguments: object, **named: object) -> Any:
        with _refusals(name):
            return method(self._native, *arguments, **named)

    return call


if TYPE_CHECKING:
    from atoll.kernels._native import _EngineCalls
else:
    _names = [name for name in vars(_native.ExchangeEngine) if not name.startswith("_")]
    _EngineCalls = type("_EngineCalls", (), {name: _forwarded(name) for name in _names})


class ExchangeEngine(_EngineCalls):
    """One rank's engine. Its owner calls `close`. Methods that the native engine has alike are in _native.pyi.

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

    def __init__(
        self,
        *,
        rank: int,
        islands: Sequence[Sequence[int]],
        threads: int = 1,
        values: Values = "float16",
        selection: Selection = "threshold",
        error_feedback: bool = True,
        digest_every: int = 0,
        seed: int = 0,
        first_round: int = 0,
        exchange: Exchange = "gradients",
        every: int = 1,
        replicas: bool = False,
    ) -> None:
        with _refusals("ExchangeEngine"):
            self._native = _native.ExchangeEngine(
                rank, [list(island) for island in islands], threads, values, selection, error_feedback, digest_every,
                seed, first_round, exchange, every, replicas,
            )  # fmt: skip
        # Threads must not compute on memory that the end of the interpreter takes away.
        self._finalizer = weakref.finalize(self, self._native.close)

    def add_tensor(
        self,
        *,
        order: int,
        rule: Rule,
        shared_param: Any,
        residual: Any,
        first: Any = None,
        second: Any = None,
        last_step: Any = None,
        live: Any = None,
        group: int = 0,
        turn: int = 0,
        aggregator: int | None = None,
        aggregator_sum: Any = None,
    ) -> int:
        """Take in a tensor of n entries; returns its number: 0, 1, ... All ranks add the same ones in the same order.

        order: its place in the forward pass. shared_param, residual, first, second: float32 [n] on the CPU, kept alive
        and written in place; first: momentum or first moment (None: SGD without), second: Adam's. Residual and moments
        begin as zeros. Without error feedback the residual is never touched and may be None.
        last_step: int32 [ceil(n / 16)], zeros, or None: moments of blocks that an update missed are decayed later.
        live: float32, float16 or bfloat16 [n], the model's own weights, written by `fetch` alone; None: the caller
        keeps the copy and takes `changes`. group: index into `apply`'s groups. turn: the rounds in which the tensor is
        exchanged are turn, turn + every, ...
        aggregator: exchanging updates, index of an island whose leader alone gets the islands' sums; it adds them to
        its aggregator_sum, float32 [n], zeros, what the shared parameters are behind the sums by, and sends everybody
        the heaviest blocks of that, which the shared parameters take. Given on the aggregator's leader alone. None:
        every sum goes to all islands.
        """
        with _refusals("add_tensor"):
            number: int = self._native.add_tensor(
                order,
                rule,
                shared_param,
                residual,
                first,
                second,
                last_step,
                live,
                group,
                turn,
                aggregator,
                aggregator_sum,
            )
            return number

    def close(self) -> None:
        """Let running tasks finish, drop the others and join the threads. Waiters get `BadInput`. Repeatable."""
        self._finalizer.detach()
        self._native.close()

    def compress_chosen(self, sync_round: int, tensor: int, index: Any, values: Any, counted: Counted) -> None:
        """Send blocks as `compress` does. They were chosen where gradient and residual are, on a device.

        index: uint32 or int32 [k], ascending; values: float32 [k, 16]; both on the CPU and copied. counted: what the
        selection returned.
        What rounding to the wire takes away stays in the tensor's own residual, and goes when its block is next chosen.
        """
        with _refusals("compress_chosen"):
            self._native.compress_chosen(sync_round, tensor, index, values, counted.found, counted.nonfinite)

    def compress_chosen_live(
        self, sync_round: int, tensor: int, chosen: tuple[Any, Any, Counted], sample: Any, weight: float
    ) -> None:
        """Send blocks of weight * (reference - live) that a device chose, as `compress_live` sends its own.

        chosen: index, values and counted as for `compress_chosen`. sample: float32 [S, 16] on the CPU, copied: the
        difference's `drift_blocks` before the choice, the last one with zeros beyond the tensor's end. What rounding to
        the wire takes away stays in the difference by itself."""
        index, values, counted = chosen
        found, nonfinite = counted.found, counted.nonfinite
        with _refusals("compress_chosen_live"):
            self._native.compress_chosen_live(sync_round, tensor, index, values, found, nonfinite, sample, weight)

    def await_compressed(self, deadline_s: float, tensors: Sequence[int] = ()) -> None:
        """Wait until nothing is queued or running that reads live weights of these tensors; none given: of any. Raises
        `DeadlineExceeded`, `PeerLost`."""
        with _refusals("await_compressed"):
            self._native.await_compressed(deadline_s, list(tensors))

    def apply(
        self,
        sync_round: int,
        update: int,
        groups: Sequence[tuple[float, float, float, float, float]],
        *,
        maximize: bool = False,
        clip_norm: float = 0.0,
    ) -> None:
        """Order the optimizer's step for `sync_round`: each tensor is updated as soon as its sums are there.

        sync_round: ascends by 1 over apply and accumulate. update: 1, 2, ..., counts updates (for bias correction and
        `last_step`).
        groups: for each (lr, weight_decay, momentum or beta1, beta2, epsilon).
        clip_norm: > 0: the L2 norm of all tensors' sums together is brought down to it; then every update waits for all
        tensors' sums.
        """
        with _refusals("apply"):
            self._native.apply(sync_round, update, [tuple(group) for group in groups], maximize, clip_norm)

    def sum_updates(
        self, sync_round: int, weight: float, k_blocks: Sequence[int], aggregator_blocks: Sequence[int] | None = None
    ) -> None:
        """Exchanging updates: `compress_live` of every tensor that was added with live, and order that the shared
        parameters take the sum of all ranks' updates.

        sync_round: ascends by 1. weight: in (0, 1], of this rank's, as for `compress_live`. k_blocks: one for each
        tensor, as for `compress`; of those added without live, which `compress_live` hands in, it is not looked at.
        aggregator_blocks: as many of a tensor that this rank owns go back at most; None: as k_blocks. A tensor whose
        turn it is not is left out, with live or without.
        """
        with _refusals("sum_updates"):
            self._native.sum_updates(sync_round, weight, list(k_blocks), list(aggregator_blocks or k_blocks))

    def changes(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[float, list[Change]]:
        """Wait as `fetch` does, for tensors without live. Return the seconds waited, and of each tensor the blocks that
        changed since the last call, with their values in shared_param. Exchanging updates, the values are to be added
        to the live weights."""
        with _refusals("changes"):
            waited_s, rows = self._native.changes(list(tensors), sync_round, deadline_s)
            return waited_s, [Change._make(row) for row in rows]

    def take_outgoing(self, limit: int = 64) -> list[Outgoing]:
        """Messages to send, the most urgent first."""
        with _refusals("take_outgoing"):
            return [Outgoing._make(row) for row in self._native.take_outgoing(limit)]

    def recent_parts(self) -> list[RecentPart]:
        """The parts, and as an aggregator the totals, that this rank sent in the newest rounds of each tensor, oldest
        round first: 4, or as many as `remember` said."""
        with _refusals("recent_parts"):
            return [RecentPart._make(row) for row in self._native.recent_parts()]

    def waiting_for(self, limit: int = 8) -> list[str]:
        """The reasons for which begun rounds still wait, a sentence a tensor, for at most `limit` tensors."""
        with _refusals("waiting_for"):
            reasons: list[str] = self._native.waiting_for(limit)
            return reasons

    def take_stats(self) -> EngineStats:
        """The figures since the last call."""
        with _refusals("take_stats"):
            return EngineStats._make(self._native.take_stats())
