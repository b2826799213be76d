from collections.abc import Sequence
from typing import Required, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.exchange_engine import Change, EngineStats, Outgoing, RecentPart

class CpuFeatures(TypedDict):
    path: str
    threads: int

class _How(TypedDict, total=False):
    threads: int
    portable: bool

def squared_norm(x: object, **how: Unpack[_How]) -> float: ...
def threshold_block(
    gradient: object,
    residual: object,
    weight: float,
    threshold: float,
    index: object,
    values: object,
    **how: Unpack[_How],
) -> tuple[int, int, int]: ...
def topk_block(
    gradient: object, residual: object, weight: float, index: object, values: object, **how: Unpack[_How]
) -> tuple[int, int, int]: ...
def random_block(
    gradient: object, residual: object, weight: float, seed: int, index: object, values: object, **how: Unpack[_How]
) -> tuple[int, int, int]: ...
def sign_encode(values: object, bits: object, scales: object, two_sided: bool, **how: Unpack[_How]) -> None: ...
def sign_add(bits: object, scales: object, out: object, two_sided: bool, **how: Unpack[_How]) -> None: ...
def sample_scores(gradient: object, residual: object, weight: float, seed: int, scores: object) -> None: ...
def cpu_features() -> CpuFeatures: ...
def stop_threads() -> None: ...

class ThresholdController:
    """The loop that finds the exchange engine's threshold."""

    def __init__(self, target: int) -> None: ...
    @property
    def threshold(self) -> float: ...
    @property
    def needs_sample(self) -> bool: ...
    def aim_at(self, target: int) -> None: ...
    def start(self, scores: object, blocks: int) -> float: ...
    def update(self, found: int) -> float: ...

def hierarchical_hash(
    unit: object, seeds: Sequence[int], partitions: int, order: object, slots: int = 0, threads: int = 0
) -> tuple[list[int], int]: ...
def partition_members(seed: int, partitions: int, member: object) -> list[int]: ...
def bitmap_encode(member: object, unit: object, bitmap: object) -> None: ...
def bitmap_decode(member: object, bitmap: object, unit: object) -> None: ...
def sum_coordinates(
    terms: Sequence[tuple[object, object]],
    units: int,
    width: int,
    seed: int = 0,
    partitions: int = 0,
    partition: Sequence[int] = (),
    threads: int = 0,
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]: ...
def distinct_rows(values: object, width: int, reference: object, first: object) -> int: ...
def nonzero_units(dense: object, width: int, threads: int = 0) -> NDArray[np.uint32]: ...

class _EngineSettings(TypedDict, total=False):
    rank: Required[int]
    islands: Required[Sequence[Sequence[int]]]
    threads: int
    values: str
    selection: str
    digest_every: int
    seed: int
    first_round: int

class ExchangeEngine:
    """Base of both engines. `atoll.kernels.exchange_engine` has the door to them, and defines a sync round."""

    def close(self) -> None:
        """Let running tasks finish, drop the others and join the threads. Waiters get `BadInput`. Repeatable."""

    def fileno(self) -> int:
        """Return an eventfd to poll: readable when `take_outgoing` has something; `fail` too makes it readable once."""

    def selection_seed(self, sync_round: int, tensor: int) -> int:
        """Return the seed of a selection of a tensor's part, the same on all ranks: for what is chosen elsewhere."""

    def await_compressed(self, deadline_s: float, tensors: Sequence[int] = ()) -> None:
        """Wait until no task reads live weights of these tensors; none given: of any.

        Raises `DeadlineExceeded`, `PeerLost`."""

    def snapshot(self, sync_round: int, tensor: int, ranges: Sequence[tuple[object, object]]) -> None:
        """Capture memory that updates of a tensor change as it is at `sync_round`, while later rounds are exchanged.

        The round must not be older than the tensor's version. Memory is copied by `await_snapshot`, or right before a
        later round is applied. ranges: pairs (source, into) of uint8 buffers of the same length, of shared_param,
        moments or last_step. An earlier snapshot of the tensor is forgotten."""

    def await_snapshot(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> None:
        """Wait until every tensor has been applied or accumulated up to `sync_round`; their snapshots are whole then.

        Raises `DeadlineExceeded`, which says what is missing, and `PeerLost`."""

    def remember(self, rounds: int) -> None:
        """Keep parts of so many of each tensor's newest rounds for `recent_parts`: as many as ranks may be apart."""

    def fetch(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[int, int, float]:
        """Wait until every tensor has been applied or accumulated up to `sync_round`, then bring live up to date.

        Returns the lowest version among them, how many are newer than `sync_round`, and the seconds waited. Raises
        `DeadlineExceeded`, which says what is missing, and `PeerLost` after `fail`; live is then as it was. Exchanging
        updates, the sums are added to live, and this rank's own parts, which it had before, taken out."""

    def changes(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[float, list[Change]]:
        """Wait as `fetch` does, for tensors without live; returns the seconds waited, and changed blocks of each.

        They are those that changed since the last call, with what shared_param holds there. Exchanging updates, the
        values are to be added to the live weights."""

    def versions(self) -> list[int]:
        """Return the last round of each tensor that was applied or accumulated."""

    def read_shared_param(self, tensor: int, out: object) -> None:
        """Write into out, float32 [n], a tensor's shared_param at whatever sync round it is.

        The shared parameter's own memory may be read only while nothing is compressed: for a moment it is another."""

    def take_outgoing(self, limit: int = 64) -> list[Outgoing]:
        """Return messages to send, the most urgent first."""

    def deliver(self, kind: int, origin: int, sync_round: int, tensor: int, count: int, payload: object) -> str | None:
        """Take in a part of rank `origin` (kind 0) or the sum of island `origin` (kind 1); payload is copied.

        Returns None, or why it was refused: "unknown tensor", "from nobody", "old round", "round too far ahead",
        "twice", "too large". Bytes that make no sense are found later, by a thread, and fail the engine."""

    def fail(self, reason: str) -> None:
        """Make every `fetch` and `changes`, waiting or to come, raise PeerLost(reason). The first reason stays.

        Any thread may call it, also when the engine is closed: then nobody waits."""

    def quiesce(self, deadline_s: float) -> None:
        """Let running tasks finish and begin no more until `resume`: shared parameters, moments and residuals rest.

        Raises `DeadlineExceeded` if a task takes longer; then tasks continue."""

    def resume(self) -> None:
        """Begin tasks again after `quiesce`."""

    def recent_parts(self) -> list[RecentPart]:
        """Return the parts, and as an aggregator the totals, that this rank sent in the newest rounds of each tensor.

        The oldest round is first: of 4, or as many as `remember` said."""

    def idle(self, deadline_s: float) -> None:
        """Wait until no task is queued or running; raises `DeadlineExceeded`."""

    def digests(self) -> list[tuple[int, int, int]]:
        """Return (sync_round, tensor, 64-bit digest of its shared_param after that round), each once.

        They are equal on all ranks."""

    def take_stats(self) -> EngineStats:
        """Return the figures since the last call."""

class GradientEngine(ExchangeEngine):
    """Engine that exchanges gradients."""

    def __init__(self, *, error_feedback: bool = True, **settings: Unpack[_EngineSettings]) -> None: ...
    def add_tensor(
        self,
        *,
        order: int,
        rule: str,
        shared_param: object,
        residual: object,
        first: object = None,
        second: object = None,
        last_step: object = None,
        live: object = None,
        group: int = 0,
    ) -> int:
        """Add a tensor of n entries; returns its number: 0, 1, ... All ranks add the same ones in the same order.

        order: its place in the forward pass. shared_param, residual, first, second: float32 [n] on the CPU, kept alive
        and written in place; first: momentum or first moment (None: SGD without), second: Adam's. Residual and moments
        begin as zeros. Without error feedback the residual is never touched and may be None.
        last_step: int32 [ceil(n / 16)], zeros, or None: moments of blocks that an update missed are decayed later.
        live: float32, float16 or bfloat16 [n], the model's own weights, written by `fetch` alone; None: the caller
        keeps the copy and takes `changes`. group: index into `apply`'s groups."""

    def compress(self, sync_round: int, tensor: int, gradient: object, weight: float, k_blocks: int) -> None:
        """Queue the choice of at most `k_blocks` blocks of residual + weight * gradient; the rest becomes the residual.

        sync_round: ascends by 1 for each tensor. gradient: float32, float16 or bfloat16 [n] on the CPU, kept alive and
        not to be written until it is done; None, or weight 0: it contributes nothing. k_blocks: 1 or more; from all
        blocks on, everything that is not zero travels."""

    def compress_chosen(
        self, sync_round: int, tensor: int, index: object, values: object, counted: tuple[int, int, int]
    ) -> None:
        """Send blocks that were chosen where gradient and residual are, on a device, as `compress` sends its own.

        index: uint32 or int32 [k], ascending; values: float32 [k, 16]; both on the CPU and copied. counted: what the
        selection returned. What rounding to the wire takes away stays in the tensor's own residual, and leaves when its
        block is next chosen."""

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
        `last_step`). groups: for each (lr, weight_decay, momentum or beta1, beta2, epsilon). clip_norm: > 0: the L2
        norm of all tensors' sums together is brought down to it; then every update waits for all tensors' sums."""

    def accumulate(self, sync_round: int) -> None:
        """Order no update for `sync_round`: its sums go into the next round's. Until then they are nowhere else."""

    def snapshot_residual(self, sync_round: int, tensor: int, out: object) -> None:
        """Capture in out, float32 [n], this rank's residual after its part of `sync_round`, the newest begun.

        It is captured as `snapshot` does, before the next part is chosen. What the rounding of later sums up to
        `sync_round` takes away is added, so out is whole after `await_snapshot`."""

class UpdateEngine(ExchangeEngine):
    """Engine that exchanges updates."""

    def __init__(self, *, every: int = 1, replicas: bool = False, **settings: Unpack[_EngineSettings]) -> None: ...
    def add_tensor(
        self,
        *,
        order: int,
        shared_param: object,
        live: object = None,
        turn: int = 0,
        aggregator: int | None = None,
        aggregator_sum: object = None,
    ) -> int:
        """Add a tensor, as of `GradientEngine`.

        turn: the rounds in which the tensor is exchanged are turn, turn + every, ...
        aggregator: index of an island whose leader alone gets the islands' sums. It adds them to its aggregator_sum,
        float32 [n], zeros, what the shared parameters are behind the sums by, and sends everybody the heaviest blocks
        of that, which the shared parameters take. Given on the aggregator's leader alone. None: every sum goes to all
        islands."""

    def compress_chosen_live(
        self,
        sync_round: int,
        tensor: int,
        chosen: tuple[object, object, tuple[int, int, int]],
        sample: object,
        weight: float,
    ) -> None:
        """Send blocks of weight * (reference - live) that a device chose, as `compress_live` sends its own.

        chosen: as for `GradientEngine.compress_chosen`. sample: float32 [S, 16] on the CPU, copied: the difference's
        `drift_blocks` before the choice, the last one with zeros beyond the tensor's end. What rounding to
        the wire takes away stays in the difference by itself."""

    def take_reference(self, tensor: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return the blocks of the reference that changed since the last call, or since `set_live`.

        Of a tensor that was added without live. After `set_live` the reference is the shared
        parameter: what this rank's weights would be if they lacked nothing, so that weight * (reference - live) is what
        `compress_live` chooses from. Returns index [k], ascending, and values [k, 16]. `compress_chosen_live` of what
        was chosen follows before the next call, and before `changes` are taken."""

    def drift_blocks(self, tensor: int) -> tuple[int, ...]:
        """Return the blocks of a tensor whose differences `compress_chosen_live` takes, ascending."""

    def compress_live(self, sync_round: int, tensor: int, live: object, weight: float, k_blocks: int) -> None:
        """Queue the choice of at most `k_blocks` blocks of weight * (shared_param - live), less what is on its way.

        It is what this rank's own weights have and the shared parameters have not. live: None, the
        tensor's own; for a tensor added without, a copy of the weights kept elsewhere, with all `changes` that were
        taken before this call, and none that are taken later. Not to be written until `await_compressed` returned.
        weight: in (0, 1], the same for all tensors in this round. Otherwise as `GradientEngine.compress`. A block that
        is not finite is counted and never sent."""

    def read_residual(self, tensor: int, live: object, out: object) -> int:
        """Write into out, float32 [n], what this rank has not sent yet of a tensor.

        live: as for `compress_live`, a copy with all `changes` that were taken. Returns how many blocks are not finite
        (counted, never sent); they are 0 in out."""

    def set_live(self, tensor: int, residual: object, weight: float, live: object) -> None:
        """Set live to shared_param - residual / weight: as of a rank that has not sent so much yet.

        residual: float32 [n], or None for 0. weight: in (0, 1], until the next round. live: None, the tensor's own;
        else, for a tensor added without, a buffer for the weights that are kept elsewhere. Call it between two updates,
        with nothing on the way."""

    def snapshot_residual(self, sync_round: int, tensor: int, live: object, out: object) -> int:
        """Capture in out, float32 [n], this rank's residual after its part of `sync_round`, the newest begun, at once.

        live and the result as for `read_residual`; call it after `await_compressed` and before the next update of the
        live weights. Rounding is added as in `GradientEngine.snapshot_residual`."""

    def sum_updates(
        self, sync_round: int, weight: float, k_blocks: Sequence[int], aggregator_blocks: Sequence[int] = ()
    ) -> None:
        """Call `compress_live` of every tensor with live, and order that shared parameters take all ranks' updates.

        sync_round: ascends by 1. weight: in (0, 1], of this rank's, as for `compress_live`. k_blocks: one for each
        tensor, as for `compress_live`; of those added without live, which it hands in, it is not looked at.
        aggregator_blocks: as many of a tensor that this rank owns go back at most; none: as k_blocks. A tensor whose
        turn it is not is left out, with live or without."""

    def change_turns(self, sync_round: int, every: int, turns: Sequence[int]) -> None:
        """Exchange each tensor in every so-many-th round alone, from `sync_round` on, the next to be summed.

        turns: of each tensor. Rounds that are under way end as they began. Called on all ranks from
        the same round."""

class Timeline:
    """One backward pass and the synchronisation of its tensors. kernels/planning/timeline.hpp has the order of service.

    tensors [N]: (bytes, seconds of the backward pass). options: the tasks [T] of each option in their order, as
    (resource, alpha, beta, factor); a task takes alpha + beta * bytes * factor seconds. resources: their number.
    One thread at a time. Raises ValueError for arguments that do not fit."""

    def __init__(
        self,
        tensors: Sequence[tuple[float, float]],
        options: Sequence[Sequence[tuple[int, float, float, float]]],
        resources: int,
    ) -> None: ...
    def end_s(self, choice: Sequence[int]) -> float:
        """Return the seconds until everything has ended, with option choice[i] for tensor i."""

    def search(self, tasks: int) -> tuple[list[int], float]:
        """Return an option for each tensor with a short timeline, and its end (rules: kernels/planning/search.hpp).

        tasks: about how many to simulate."""

def fuse(
    tensors: Sequence[tuple[float, float]], compress: tuple[float, float, float], communicate: tuple[float, float]
) -> tuple[list[int], float]:
    """Return the end of each group of consecutive tensors, and the time at which all are sent. No grouping is sooner.

    tensors [N]: (bytes, seconds of the backward pass). compress: (alpha, beta, floor); a group takes alpha + beta *
    max(bytes, floor) seconds on the device. communicate: (alpha, beta), on one link."""
