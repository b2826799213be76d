"""Facts of a job's script that its workers report at the end of `run.prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.v1.agents_pb2 import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """Model, optimizers and wrappers of a script, as far as the choice of a strategy depends on them.

    entries, tensors: of trained parameters. gradient_density: share of gradient entries that are not zero, 1 if
    unknown. refused: strategies that the script does not allow, each with the reason. strategy: in which it trains
    since `prepare`; another than the launch's if that one is refused and was chosen automatically."""

    entries: int
    tensors: int
    gradient_density: float = 1.0
    refused: Mapping[str, str] = field(default_factory=dict)
    strategy: str = ""


def facts_from_wire(prepared: Prepared) -> ScriptFacts | None:
    """Return the facts in a checked message; None if it has none of them."""
    if not prepared.tensors:
        return None
    return ScriptFacts(
        entries=prepared.entries,
        tensors=prepared.tensors,
        gradient_density=prepared.gradient_density or 1.0,
        refused=dict(prepared.refused),
        strategy=prepared.strategy,
    )
