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
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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


class ExchangeEngine:
    """One rank's engine. Its owner calls `close`.

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
            return self._native.add_tensor(
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

    def close(self) -> None:
        """Let running tasks finish, drop the others and join the threads. Waiters get `BadInput`. Repeatable."""
        self._finalizer.detach()
        self._native.close()

    def fileno(self) -> int:
        """An eventfd to poll: readable when `take_outgoing` has something; `fail` too makes it readable once."""
        with _refusals("fileno"):
            return self._native.fileno()

    def compress(self, sync_round: int, tensor: int, gradient: Any, weight: float, k_blocks: int) -> None:
        """Queue the choice of at most `k_blocks` blocks of residual + weight * gradient; the rest becomes the residual.

        sync_round: ascends by 1 for each tensor. gradient: float32, float16 or bfloat16 [n] on the CPU, kept alive and
        not to be written until it is done; None, or weight 0: it contributes nothing. k_blocks: 1 or more; from all
        blocks on, everything that is not zero travels.
        """
        with _refusals("compress"):
            self._native.compress(sync_round, tensor, gradient, weight, k_blocks)

    def compress_chosen(self, sync_round: int, tensor: int, index: Any, values: Any, counted: Counted) -> None:
        """As `compress`, of blocks that were chosen where gradient and residual are, on a device: index uint32 or int32
        [k], ascending, values float32 [k, 16], both on the CPU and copied. counted: what the selection returned.

        What rounding to the wire takes away stays in the tensor's own residual, and goes when its block is next chosen.
        """
        with _refusals("compress_chosen"):
            self._native.compress_chosen(sync_round, tensor, index, values, counted.found, counted.nonfinite)

    def take_reference(self, tensor: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Exchanging updates, of a tensor that was added without live: the blocks of the reference that are others than
        when this was last called, or `set_live`, after which it is the shared parameter. The reference is what this
        rank's weights would be if they lacked nothing, so that weight * (reference - live) is what `compress_live`
        chooses from. Returns index [k], ascending, and values [k, 16].

        `compress_chosen_live` of what was chosen follows before the next call, and before `changes` are taken."""
        with _refusals("take_reference"):
            return self._native.take_reference(tensor)

    def drift_blocks(self, tensor: int) -> tuple[int, ...]:
        """The blocks of a tensor whose differences `compress_chosen_live` is told, ascending."""
        with _refusals("drift_blocks"):
            return self._native.drift_blocks(tensor)

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

    def selection_seed(self, sync_round: int, tensor: int) -> int:
        """The seed that a selection of a tensor's part takes, the same on all ranks: for what is chosen elsewhere."""
        with _refusals("selection_seed"):
            return self._native.selection_seed(sync_round, tensor)

    def compress_live(self, sync_round: int, tensor: int, live: Any, weight: float, k_blocks: int) -> None:
        """Exchanging updates: queue the choice of at most `k_blocks` blocks of what this rank's own weights have and
        the shared parameters have not, weight * (shared_param - live), less what is on its way.

        live: None, the tensor's own; for a tensor added without, a copy of the weights kept elsewhere, with all
        `changes` that were taken before this call, and none that are taken later. Not to be written until
        `await_compressed` returned. weight: in (0, 1], the same for all tensors in this round. Otherwise as `compress`.
        A block that is not finite is counted and never sent.
        """
        with _refusals("compress_live"):
            self._native.compress_live(sync_round, tensor, live, weight, k_blocks)

    def await_compressed(self, deadline_s: float, tensors: Sequence[int] = ()) -> None:
        """Wait until nothing is queued or running that reads live weights of these tensors; none given: of any. Raises
        `DeadlineExceeded`, `PeerLost`."""
        with _refusals("await_compressed"):
            self._native.await_compressed(deadline_s, list(tensors))

    def read_residual(self, tensor: int, live: Any, out: Any) -> int:
        """Exchanging updates: out, float32 [n], becomes what this rank has not sent yet of a tensor.

        live: as for `compress_live`, a copy with all `changes` that were taken. Returns how many blocks are not finite
        (counted, never sent); they are 0 in out.
        """
        with _refusals("read_residual"):
            return self._native.read_residual(tensor, live, out)

    def read_shared_param(self, tensor: int, out: Any) -> None:
        """Exchanging updates: out, float32 [n], becomes a tensor's shared_param, at whatever sync round it is.

        The shared parameter's own memory may be read while nothing is compressed alone: for a moment it is another."""
        with _refusals("read_shared_param"):
            self._native.read_shared_param(tensor, out)

    def set_live(self, tensor: int, residual: Any, weight: float, live: Any) -> None:
        """Exchanging updates: live becomes shared_param - residual / weight, as of a rank that has not sent so much
        yet.

        residual: float32 [n], or None for 0. weight: in (0, 1], until the next round. live: None, the tensor's own;
        else, for a tensor added without, a buffer for the weights that are kept elsewhere. Call it between two updates,
        with nothing on the way.
        """
        with _refusals("set_live"):
            self._native.set_live(tensor, residual, weight, live)

    def snapshot(self, sync_round: int, tensor: int, ranges: Sequence[tuple[Any, Any]]) -> None:
        """Have memory that updates of a tensor change captured as it is at `sync_round`, which must not be older than
        its version, while later rounds go on: by `await_snapshot`, or right before a later one is applied.

        ranges: pairs (source, into) of uint8 buffers of the same length, of shared_param, moments or last_step. An
        earlier snapshot of the tensor is forgotten.
        """
        with _refusals("snapshot"):
            self._native.snapshot(sync_round, tensor, list(ranges))

    def snapshot_residual(self, sync_round: int, tensor: int, live: Any, out: Any) -> int:
        """Have this rank's residual after its part of `sync_round`, the newest begun, captured in out, float32 [n].

        Exchanging updates, at once: live and the result as for `read_residual`; call it after `await_compressed` and
        before the next update of the live weights. Exchanging gradients, as `snapshot` does: before the next part is
        chosen. What the rounding of later sums up to `sync_round` takes away is added, so out is whole after
        `await_snapshot`.
        """
        with _refusals("snapshot_residual"):
            return self._native.snapshot_residual(sync_round, tensor, live, out)

    def await_snapshot(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> None:
        """Wait until every tensor has been applied or accumulated up to `sync_round`; their snapshots are whole then.

        Raises `DeadlineExceeded`, which says what is missing, and `PeerLost`.
        """
        with _refusals("await_snapshot"):
            self._native.await_snapshot(list(tensors), sync_round, deadline_s)

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

    def accumulate(self, sync_round: int) -> None:
        """Order no update for `sync_round`: its sums go into the next round's. Until then they are nowhere else."""
        with _refusals("accumulate"):
            self._native.accumulate(sync_round)

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

    def change_turns(self, sync_round: int, every: int, turns: Sequence[int]) -> None:
        """Exchanging updates: from `sync_round` on, the next to be summed, only each so-many-th round of a tensor is
        exchanged, which is its entry of turns. Rounds that are under way end as they began. On all ranks from the same
        round."""
        with _refusals("change_turns"):
            self._native.change_turns(sync_round, every, list(turns))

    def remember(self, rounds: int) -> None:
        """Keep parts of so many of each tensor's newest rounds for `recent_parts`: as many as ranks may be apart."""
        with _refusals("remember"):
            self._native.remember(rounds)

    def fetch(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[int, int, float]:
        """Wait until every tensor has been applied or accumulated up to `sync_round`, then bring live up to date.

        Returns the lowest version among them, how many are newer than `sync_round`, and the seconds waited. Raises
        `DeadlineExceeded`, which says what is missing, and `PeerLost` after `fail`; live is then as it was.
        Exchanging updates, the sums are added to live, and this rank's own parts, which it had before, taken out.
        """
        with _refusals("fetch"):
            return self._native.fetch(list(tensors), sync_round, deadline_s)

    def changes(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[float, list[Change]]:
        """As `fetch`, for tensors without live: the seconds waited, and of each the blocks that changed since the last
        call, with what shared_param holds there. Exchanging updates, the values are to be added to the live weights."""
        with _refusals("changes"):
            waited_s, rows = self._native.changes(list(tensors), sync_round, deadline_s)
            return waited_s, [Change._make(row) for row in rows]

    def versions(self) -> list[int]:
        """Of each tensor, the last round applied or accumulated."""
        with _refusals("versions"):
            return self._native.versions()

    def take_outgoing(self, limit: int = 64) -> list[Outgoing]:
        """Messages to send, the most urgent first."""
        with _refusals("take_outgoing"):
            return [Outgoing._make(row) for row in self._native.take_outgoing(limit)]

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, sync_round: int, tensor: int, count: int, payload: Any
    ) -> str | None:
        """Take in a part of rank `origin` (kind 0) or the sum of island `origin` (kind 1); payload is copied.

        Returns None, or why it was refused: "unknown tensor", "from nobody", "old round", "round too far ahead",
        "twice", "too large". Bytes that make no sense are found later, by a thread, and fail the engine.
        """
        with _refusals("deliver"):
            return self._native.deliver(kind, origin, sync_round, tensor, count, payload)

    def fail(self, reason: str) -> None:
        """Make every `fetch` and `changes`, waiting or to come, raise PeerLost(reason). The first reason stays. By any
        thread, also when the engine is closed: then nobody waits."""
        with _refusals("fail"):
            self._native.fail(reason)

    def quiesce(self, deadline_s: float) -> None:
        """Let running tasks finish and begin no more until `resume`: shared parameters, moments and residuals hold
        still.

        Raises `DeadlineExceeded` if a task takes longer; then tasks go on.
        """
        with _refusals("quiesce"):
            self._native.quiesce(deadline_s)

    def resume(self) -> None:
        """Begin tasks again after `quiesce`."""
        with _refusals("resume"):
            self._native.resume()

    def recent_parts(self) -> list[RecentPart]:
        """The parts, and as an aggregator the totals, that this rank sent in the newest rounds of each tensor, oldest
        round first: 4, or as many as `remember` said."""
        with _refusals("recent_parts"):
            return [RecentPart._make(row) for row in self._native.recent_parts()]

    def idle(self, deadline_s: float) -> None:
        """Wait until no task is queued or running; raises `DeadlineExceeded`."""
        with _refusals("idle"):
            self._native.idle(deadline_s)

    def digests(self) -> list[tuple[int, int, int]]:
        """(sync_round, tensor, 64-bit digest of its shared_param after that round), each once; equal on all ranks."""
        with _refusals("digests"):
            return self._native.digests()

    def waiting_for(self, limit: int = 8) -> list[str]:
        """The reasons for which begun rounds still wait, a sentence a tensor, for at most `limit` tensors."""
        with _refusals("waiting_for"):
            return self._native.waiting_for(limit)

    def take_stats(self) -> EngineStats:
        """The figures since the last call."""
        with _refusals("take_stats"):
            return EngineStats._make(self._native.take_stats())


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
