from collections.abc import Sequence
from typing import TypedDict

class CpuFeatures(TypedDict):
    path: str
    threads: int

def squared_norm(x: object, threads: int = 0, *, portable: bool = False) -> float: ...
def weighted_sum(
    out: object, inputs: Sequence[object], weights: Sequence[float], threads: int = 0, *, portable: bool = False
) -> None: ...
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
