"""How the workers of a run exchange what they learned: densely in step, or sparsely and one step late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

from atoll.errors import SettingError
from atoll.v1 import common_pb2 as pb

MAX_RATE: Final = 0.9999
Selection: TypeAlias = Literal["threshold", "topk", "random"]
Exchange: TypeAlias = Literal["updates", "gradients"]
Values: TypeAlias = Literal["float16", "bfloat16", "float32"]
Momentum: TypeAlias = Literal["lazy", "as-is"]
Scheduling: TypeAlias = Literal["edf", "fcfs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Every step all-reduces whole gradients; the optimizer is torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSparse:
    """Only the heaviest blocks of gradients travel, and a forward pass waits for the update before the last at most.

    Source: StellaTrain, SIGCOMM 2024, section 3. Raises SettingError when made."""

    rate: float = 0.99
    """Share of the entries that a step leaves behind, 0 to 0.9999. A plan may change it on the run."""

    staleness: int = 1
    """0: a forward pass waits for the step before; 1: for the one before that."""

    selection: Selection = "threshold"
    """How blocks are chosen: by a threshold that adapts, exactly (topk), or at random (the same on all ranks)."""

    exchange: Exchange = "updates"
    """What travels. updates: what each rank's own optimizer did, so that it sees its own gradients at once; any
    optimizer. gradients: the method as published, with sparse optimizers on the sums; SGD and Adam families."""

    values: Values = "float16"
    """What the chosen values are rounded to on the wire."""

    error_feedback: bool = True
    """What was not sent is added to the next step's gradient."""

    momentum: Momentum = "lazy"
    """lazy: moments of untouched blocks are decayed when they are touched; as-is: they are left alone."""

    scheduling: Scheduling = "edf"
    """Order of CPU work and messages: by step and place in the forward pass (edf), or by arrival (fcfs)."""

    digest_every: int = 100
    """Steps between comparisons of all ranks' weights; at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= MAX_RATE:  # NaN too
            raise SettingError("rate", self.rate, f"must be 0 to {MAX_RATE}", "It is the share left out, e.g. 0.99")
        if self.staleness not in (0, 1):
            raise SettingError("staleness", self.staleness, "must be 0 or 1", "Leave it out for 1")
        for name, value, known in (
            ("selection", self.selection, get_args(Selection)),
            ("exchange", self.exchange, get_args(Exchange)),
            ("values", self.values, get_args(Values)),
            ("momentum", self.momentum, get_args(Momentum)),
            ("scheduling", self.scheduling, get_args(Scheduling)),
        ):
            if value not in known:
                raise SettingError(name, value, "is not known", f"Use one of {', '.join(known)}")
        if self.exchange == "updates" and not self.error_feedback:
            why = 'has no meaning with exchange = "updates", where it is in the weights themselves'
            raise SettingError("error_feedback", False, why, 'Leave it out, or set exchange = "gradients"')
        if self.digest_every < 1:
            raise SettingError("digest_every", self.digest_every, "must be at least 1", "Leave it out for 100")


Strategy: TypeAlias = Dense | StaleSparse


def from_name(name: str) -> Strategy:
    """The strategy of this name with its defaults. Raises SettingError."""
    match name:
        case "dense":
            return Dense()
        case "stale-sparse":
            return StaleSparse()
        case _:
            raise SettingError("strategy", name, "is not known", "Use one of dense, stale-sparse")


def from_spec(spec: pb.JobSpec) -> Strategy:
    """The strategy that a job was submitted with; what its spec leaves out has the default. Raises SettingError."""
    strategy = from_name(spec.strategy or "dense")
    if isinstance(strategy, Dense):
        return strategy
    wire = spec.stale_sparse
    return StaleSparse(
        rate=wire.rate if wire.HasField("rate") else strategy.rate,
        staleness=wire.staleness if wire.HasField("staleness") else strategy.staleness,
        selection=cast(Selection, wire.selection) or strategy.selection,
        exchange=cast(Exchange, wire.exchange) or strategy.exchange,
        values=cast(Values, wire.values) or strategy.values,
        error_feedback=not wire.no_error_feedback,
        momentum=cast(Momentum, wire.momentum) or strategy.momentum,
        scheduling=cast(Scheduling, wire.scheduling) or strategy.scheduling,
        digest_every=wire.digest_every or strategy.digest_every,
    )
