from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class CpuFeatures(TypedDict):
    path: str
    threads: int

def squared_norm(x: object, threads: int = 0, *, portable: bool = False) -> float: ...
def threshold_block(
    gradient: object,
    residual: object,
    weight: float,
    threshold: float,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def difference_block(
    master: object,
    live: object,
    scale: float,
    threshold: float,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def threshold_element(
    gradient: object,
    residual: object,
    weight: float,
    threshold: float,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def topk_block(
    gradient: object,
    residual: object,
    weight: float,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def topk_element(
    gradient: object,
    residual: object,
    weight: float,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def random_block(
    gradient: object,
    residual: object,
    weight: float,
    seed: int,
    index: object,
    values: object,
    threads: int = 0,
    *,
    portable: bool = False,
) -> tuple[int, int, int]: ...
def sign_encode(
    values: object, bits: object, scales: object, two_sided: bool, threads: int = 0, *, portable: bool = False
) -> None: ...
def sign_add(
    bits: object, scales: object, out: object, two_sided: bool, threads: int = 0, *, portable: bool = False
) -> None: ...
def random_blocks(seed: int, blocks: int, index: object) -> None: ...
def sample_scores(gradient: object, residual: object, weight: float, seed: int, scores: object) -> None: ...
def payload_bound(count: int, width: int, indices: str, value_format: str) -> int: ...
def encode(
    index: object,
    values: object,
    entries: int,
    out: object,
    residual: object,
    width: int,
    indices: str,
    value_format: str,
) -> int: ...
def decode(
    payload: object, entries: int, index: object, values: object, width: int, indices: str, value_format: str
) -> None: ...
def sum_units(
    indices: Sequence[object],
    values: Sequence[object],
    out_index: object,
    out_values: object,
    width: int,
    threads: int = 0,
) -> int: ...
def update_blocks(
    master: object,
    first: object,
    second: object,
    last_step: object,
    live: object,
    index: object,
    values: object,
    rule: str,
    step: int,
    lr: float,
    weight_decay: float,
    momentum_or_beta1: float,
    beta2: float,
    epsilon: float,
    scale: float,
    threads: int = 0,
    *,
    portable: bool = False,
) -> int: ...
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

def murmur3(key: object, seed: int, out: object) -> None: ...
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

class ExchangeEngine:
    def __init__(
        self,
        rank: int,
        islands: Sequence[Sequence[int]],
        threads: int,
        values: str,
        selection: str,
        error_feedback: bool,
        digest_every: int,
        seed: int,
        first_round: int,
        exchange: str,
        every: int,
        replicas: bool,
    ) -> None: ...
    def add_tensor(
        self,
        order: int,
        rule: str,
        master: object,
        residual: object,
        first: object,
        second: object,
        last_step: object,
        live: object,
        group: int,
        turn: int,
        owner: int | None,
        owner_sum: object,
    ) -> int: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def compress(self, sync_round: int, tensor: int, gradient: object, weight: float, k_blocks: int) -> None: ...
    def compress_chosen(
        self, sync_round: int, tensor: int, index: object, values: object, found: int, nonfinite: int
    ) -> None: ...
    def compress_chosen_live(
        self,
        sync_round: int,
        tensor: int,
        index: object,
        values: object,
        found: int,
        nonfinite: int,
        sample: object,
        weight: float,
    ) -> None: ...
    def take_reference(self, tensor: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]: ...
    def drift_blocks(self, tensor: int) -> tuple[int, ...]: ...
    def selection_seed(self, sync_round: int, tensor: int) -> int: ...
    def compress_live(self, sync_round: int, tensor: int, live: object, weight: float, k_blocks: int) -> None: ...
    def await_compressed(self, deadline_s: float, tensors: Sequence[int]) -> None: ...
    def read_residual(self, tensor: int, live: object, out: object) -> int: ...
    def read_master(self, tensor: int, out: object) -> None: ...
    def set_live(self, tensor: int, residual: object, weight: float, live: object) -> None: ...
    def apply(
        self, sync_round: int, update: int, groups: Sequence[tuple[float, ...]], maximize: bool, clip_norm: float
    ) -> None: ...
    def snapshot(self, sync_round: int, tensor: int, ranges: Sequence[tuple[object, object]]) -> None: ...
    def snapshot_residual(self, sync_round: int, tensor: int, live: object, out: object) -> int: ...
    def await_snapshot(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> None: ...
    def accumulate(self, sync_round: int) -> None: ...
    def sum_updates(
        self, sync_round: int, weight: float, k_blocks: Sequence[int], owner_blocks: Sequence[int]
    ) -> None: ...
    def change_turns(self, sync_round: int, every: int, turns: Sequence[int]) -> None: ...
    def remember(self, rounds: int) -> None: ...
    def fetch(self, tensors: Sequence[int], sync_round: int, deadline_s: float) -> tuple[int, int, float]: ...
    def changes(
        self, tensors: Sequence[int], sync_round: int, deadline_s: float
    ) -> tuple[float, list[tuple[int, NDArray[np.uint32], NDArray[np.float32]]]]: ...
    def versions(self) -> list[int]: ...
    def take_outgoing(self, limit: int) -> list[tuple[int, int, int, int, int, bytes, int]]: ...
    def deliver(
        self, kind: int, origin: int, sync_round: int, tensor: int, count: int, payload: object
    ) -> str | None: ...
    def fail(self, reason: str) -> None: ...
    def quiesce(self, deadline_s: float) -> None: ...
    def resume(self) -> None: ...
    def recent_parts(self) -> list[tuple[int, int, int, NDArray[np.uint32], NDArray[np.float32]]]: ...
    def idle(self, deadline_s: float) -> None: ...
    def digests(self) -> list[tuple[int, int, int]]: ...
    def waiting_for(self, limit: int) -> list[str]: ...
    def take_stats(self) -> tuple[int, float, float, float, float, float, int, int, int, int, int, float]: ...

class Timeline:
    def __init__(
        self,
        tensors: Sequence[tuple[float, float]],
        options: Sequence[Sequence[tuple[int, float, float, float]]],
        resources: int,
    ) -> None: ...
    def end_s(self, choice: Sequence[int]) -> float: ...
    def search(self, tasks: int) -> tuple[list[int], float]: ...

def fuse(
    tensors: Sequence[tuple[float, float]], compress: tuple[float, float, float], communicate: tuple[float, float]
) -> tuple[list[int], float]: ...
