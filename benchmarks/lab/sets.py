"""The tables of docs/performance.md on the WAN data plane, as what the laboratory is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lab.options import MODELS, SPARSE_MODELS

# Training loss, mean of 10 iterations.
TARGETS: Final = {"mlp": 0.30, "gpt": 2.50, "words": 5.20, "words-sparse": 5.20, "table": 1.0}
BASELINES: Final = "ddp,ddp-fp16,ddp-powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Every model with every number of workers, every rate and every method; the command line's own form."""

    models: tuple[str, ...] = ("mlp",)
    workers: tuple[int, ...] = (2,)
    rates: str = "100"
    methods: str = f"local,{BASELINES},stale-sparse"
    steps: int = 60
    to_target: bool = False  # of TARGETS
    max_s: float = 60.0


SETS: Final[Mapping[str, Experiment]] = {
    # Time to accuracy against DDP and its hooks.
    "tta": Experiment(
        models=MODELS, workers=(2, 4), rates="100,500,1000,trace", steps=400, to_target=True, max_s=300.0
    ),
    # A step against the same workers with no network at all, and its stall.
    "floor": Experiment(models=MODELS, rates="100,none", methods="local,stale-sparse,dense", steps=100),
    "staleness": Experiment(
        models=("mlp", "gpt"), rates="100,500", steps=300, to_target=True, max_s=300.0,
        methods="local,stale-sparse:staleness=1,stale-sparse:staleness=0",
    ),
    # What travels: each rank's updates, or gradients as published.
    "exchange": Experiment(
        models=("mlp", "gpt"), rates="100", steps=150,
        methods="local,ddp,stale-sparse:sparsity=0.99,stale-sparse:sparsity=0.9,"
        "stale-sparse:sparsity=0.99,exchange=gradients,stale-sparse:sparsity=0.9,exchange=gradients",
    ),
    "feedback": Experiment(
        rates="none", steps=200,
        methods="stale-sparse:sparsity=0.9,exchange=gradients,stale-sparse:sparsity=0.9,exchange=gradients,error_feedback=false,"
        "stale-sparse:sparsity=0.99,exchange=gradients,stale-sparse:sparsity=0.99,exchange=gradients,error_feedback=false",
    ),
    "momentum": Experiment(
        models=("mlp", "gpt"), rates="none", steps=200,
        methods="stale-sparse:sparsity=0.9,exchange=gradients,momentum=lazy,"
        "stale-sparse:sparsity=0.9,exchange=gradients,momentum=as-is,"
        "stale-sparse:sparsity=0.99,exchange=gradients,momentum=lazy,"
        "stale-sparse:sparsity=0.99,exchange=gradients,momentum=as-is",
    ),
    # Sparse gradients against the same workers with no network at all, by each scheme, and against gloo's all-gather.
    "sparse": Experiment(
        models=SPARSE_MODELS, workers=(2, 4), steps=60,
        methods="local,ddp,zen,zen:scheme=zen,zen:scheme=agsparse,zen:scheme=sparcml,zen:scheme=sparse-ps",
    ),
    "memory": Experiment(models=MODELS, rates="1000", methods=f"local,{BASELINES},dense,stale-sparse", steps=30),
}  # fmt: skip
