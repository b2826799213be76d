from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

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

class _EngineCalls:
    """Methods that atoll.kernels.ExchangeEngine forwards as they are. This class exists in the stub alone."""

    def fileno(self) -> int:
        """An eventfd to poll: readable when `take_outgoing` has something; `fail` too makes it readable once."""

    def compress(self, sync_round: int, tensor: int, gradient: Any, weight: float, k_blocks: int) -> None:
        """Queue the choice of at most `k_blocks` blocks of residual + weight * gradient; the rest becomes the residual.

        sync_round: ascends by 1 for each tensor. gradient: float32, float16 or bfloat16 [n] on the CPU, kept alive and
        not to be written until it is done; None, or weight 0: it contributes nothing. k_blocks: 1 or more; from all
        blocks on, everything that is not zero travels.
        """

    def take_reference(self, tensor: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Exchanging updates, of a tensor that was added without live: the blocks of the reference that are others than
        when this was last called, or `set_live`, after which it is the shared parameter. The reference is what this
        rank's weights would be if they lacked nothing, so that weight * (reference - live) is what `compress_live`
        chooses from. Returns index [k], ascending, and values [k, 16].

        `compress_chosen_live` of what was chosen follows before the next call, and before `changes` are taken."""

    def drift_blocks(self, tensor: int) -> tuple[int, ...]:
        """The blocks of a tensor whose differences `compress_chosen_live` is told, ascending."""

    def selection_seed(self, sync_round: int, tensor: int) -> int:
        """The seed that a selection of a tensor's part takes, the same on all ranks: for what is chosen elsewhere."""

    def compress_live(self, sync_round: int, tensor: int, live: Any, weight: float, k_blocks: int) -> None:
        """Exchanging updates: queue the choice of at most `k_blocks` blocks of what this rank's own weights have and
        the shared parameters have not, weight * (shared_param - live), less what is on its way.

        live: None, the tensor's own; for a tensor added without, a copy of the weights kept elsewhere, with all
        `changes` that were taken before this call, and none that are taken later. Not to be written until
        `await_compressed` returned. weight: in (0, 1], the same for all tensors in this round. Otherwise as `compress`.
        A block that is not finite is counted and never sent.
        """

    def read_residual(self, tensor: int, live: Any, out: Any) -> int:
        """Exchanging updates: out, float32 [n], becomes what this rank has not sent yet of a tensor.

        live: as for `compress_live`, a copy with all `changes` that were taken. Returns how many blocks are not finite
        (counted, never sent); they are 0 in out.
        """

    def read_shared_param(self, tensor: int, out: Any) -> None:
        """Exchanging updates: out, float32 [n], becomes a tensor's shared_param, at whatever sync round it is.

        The shared parameter's own memory may be read while nothing is compressed alone: for a moment it is another."""

    def set_live(self, tensor: int, residual: Any, weight: float, live: Any) -> None:
        """Exchanging updates: live becomes shared_param - residual / weight, as of a rank that has not sent so much
        yet.

        residual: float32 [n], or None for 0. weight: in (0, 1], until the next round. live: None, the tensor's own;
        else, for a tensor added without, a buffer for the weights that are kept elsewhere. Call it between two updates,
        with nothing on the way.
        """

    def snapshot(self, sync_round: int, tensor: int, ranges: Sequence[tuple[Any, Any]]) -> None:
        """Have memory that updates of a tensor change captured as it is at `sync_round`, which must not be older than
        its version, while later rounds go on: by `await_snapshot`, or right before a later one is applied.

        ranges: pairs (source, into) of uint8 buffers of the same length, of shared_param, moments or last_step. An
        earlier snapshot of the tensor is forgotten.
        """

    def snapshot_residual(self, sync_round: int, tensor: int, live: Any, out: Any) -> int:
        """Have this rank's residual after its part of `sync_round`, the newest begun, captured in out, float32 [n].

        Exchanging updates, at once: live and the result as for `read_residual`; call it after `await_compressed` and
        before the next update of the live weights. Exchanging gradients, as `snapshot` does: before the next part is
        chosen. What the rounding of later sums up to `sync_round` takes away is added, so out is whole after
        `await_snapshot`.
        """

    def await_snapshot(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> None:
        """Wait until every tensor has been applied or accumulated up to `sync_round`; their snapshots are whole then.

        Raises `DeadlineExceeded`, which says what is missing, and `PeerLost`.
        """

    def accumulate(self, sync_round: int) -> None:
        """Order no update for `sync_round`: its sums go into the next round's. Until then they are nowhere else."""

    def change_turns(self, sync_round: int, every: int, turns: Sequence[int]) -> None:
        """Exchanging updates: from `sync_round` on, the next to be summed, only each so-many-th round of a tensor is
        exchanged, which is its entry of turns. Rounds that are under way end as they began. On all ranks from the same
        round."""

    def remember(self, rounds: int) -> None:
        """Keep parts of so many of each tensor's newest rounds for `recent_parts`: as many as ranks may be apart."""

    def fetch(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[int, int, float]:
        """Wait until every tensor has been applied or accumulated up to `sync_round`, then bring live up to date.

        Returns the lowest version among them, how many are newer than `sync_round`, and the seconds waited. Raises
        `DeadlineExceeded`, which says what is missing, and `PeerLost` after `fail`; live is then as it was.
        Exchanging updates, the sums are added to live, and this rank's own parts, which it had before, taken out.
        """

    def versions(self) -> list[int]:
        """Return each tensor's last round that was applied or accumulated."""

    def deliver(self, kind: int, origin: int, sync_round: int, tensor: int, count: int, payload: Any) -> str | None:
        """Take in a part of rank `origin` (kind 0) or the sum of island `origin` (kind 1); payload is copied.

        Returns None, or why it was refused: "unknown tensor", "from nobody", "old round", "round too far ahead",
        "twice", "too large". Bytes that make no sense are found later, by a thread, and fail the engine.
        """

    def fail(self, reason: str) -> None:
        """Make every `fetch` and `changes`, waiting or to come, raise PeerLost(reason). The first reason stays. By any
        thread, also when the engine is closed: then nobody waits."""

    def quiesce(self, deadline_s: float) -> None:
        """Let running tasks finish and begin no more until `resume`: shared parameters, moments and residuals hold
        still.

        Raises `DeadlineExceeded` if a task takes longer; then tasks go on.
        """

    def resume(self) -> None:
        """Begin tasks again after `quiesce`."""

    def idle(self, deadline_s: float) -> None:
        """Wait until no task is queued or running; raises `DeadlineExceeded`."""

    def digests(self) -> list[tuple[int, int, int]]:
        """(sync_round, tensor, 64-bit digest of its shared_param after that round), each once; equal on all ranks."""

class ExchangeEngine(_EngineCalls):
    """Other methods take what atoll.kernels.exchange_engine passes, by their places."""

    def __init__(self, *settings: object) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

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
