from collections.abc import Sequence

def device_count() -> int: ...
def squared_norm(x: object, stream: int) -> float: ...
def weighted_sum(out: object, inputs: Sequence[object], weights: Sequence[float], stream: int) -> None: ...
def threshold_block(
    gradient: object, residual: object, weight: float, threshold: float, index: object, values: object, stream: int
) -> tuple[int, int, int]: ...
def topk_block(
    gradient: object, residual: object, weight: float, index: object, values: object, stream: int
) -> tuple[int, int, int]: ...
def random_block(
    gradient: object, residual: object, weight: float, seed: int, index: object, values: object, stream: int
) -> tuple[int, int, int]: ...
def random_blocks(seed: int, blocks: int, index: object, stream: int) -> None: ...
def sample_scores(
    gradient: object, residual: object, weight: float, seed: int, scores: object, stream: int
) -> None: ...
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
    stream: int,
) -> int: ...
def scatter_blocks(live: object, index: object, values: object, stream: int) -> None: ...
