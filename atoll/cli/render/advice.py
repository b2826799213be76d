"""Advice of `atoll advise` as a table for people and as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from atoll.cli.render import terminal

if TYPE_CHECKING:
    from atoll.profiling.advice import Advice, AdvisedStrategy

COLUMNS: Final = ("STRATEGY", ">STEP", ">STEPS/S", ">SENT", ">TIME", ">STEPS FOR ONE", ">MEMORY", "REASON")


def show(script: str, advice: Advice) -> None:
    """Print what was measured and assumed, the table, and what would help."""
    measured = advice.script
    sparse = measured.gradient_density < 1
    density = f", {100 * measured.gradient_density:.2g} % of a gradient not zero" if sparse else ""
    batch = f", batch {measured.batch}" if measured.timed else ""  # a pipeline's is a round
    print(f"{script}: {measured.entries:,} entries in {measured.tensors} tensors{batch}{density}")
    for one in measured.timed:
        time = f"{seconds(one.compute_s)} ± {100 * one.error:.0f} %"
        print(f"measured: a step of {one.samples} samples computes for {time} on this machine ({measured.device})")
    for fact in advice.careful:
        print(f"careful:  {fact}")
    for fact in advice.cluster.measured:
        print(f"measured: {fact}")
    for fact in _assumed(advice):
        print(f"assumed:  {fact}")
    print()
    terminal.print_table(COLUMNS, [_row(one, chosen=one.name == advice.chosen) for one in advice.strategies])
    print()
    if advice.chosen:
        print(f"best: {advice.reason}")
    else:
        print(advice.reason)
    for fact in advice.helps:
        print(f"would help: {fact}")


def document(advice: Advice) -> dict[str, Any]:
    """Return the advice as JSON holds it."""
    script, cluster = advice.script, advice.cluster
    return {
        "script": asdict(script) | {"refused": dict(script.refused)},
        "islands": {name: sum(place.island == name for place in cluster.places) for name in cluster.islands},
        "samples": list(advice.samples),
        "links": [link.model_dump() for link in cluster.links],
        "strategies": [
            {
                "name": one.name,
                "step_s": one.predicted.step_s if one.predicted else None,
                "steps_per_s": 1 / one.predicted.step_s if one.predicted and one.predicted.step_s else None,
                "bytes": one.predicted.bytes if one.predicted else None,
                "relative_time": one.ratio,
                "steps": one.predicted.steps if one.predicted else None,
                "least_steps": one.predicted.least_steps if one.predicted else None,
                "most_steps": one.predicted.most_steps if one.predicted else None,
                "memory_bytes": one.memory_bytes,
                "refused": one.refused,
            }
            for one in advice.strategies
        ],
        "chosen": advice.chosen,
        "reason": advice.reason,
        "helps": list(advice.helps),
        "measured": list(cluster.measured),
        "assumed": _assumed(advice),
        "careful": list(advice.careful),
    }


def _assumed(advice: Advice) -> list[str]:
    if not advice.script.timed:
        return []
    factors = "steps for one of whole gradients: from small models, with their range (docs/planners.md, `strategy`)"
    spare = "a core is spare beside training: exchanges of updates use it, and steps take longer without one"
    return [*advice.cluster.assumed, spare, factors, "memory: of the measured steps, and what strategies keep at least"]


def _row(one: AdvisedStrategy, *, chosen: bool) -> list[str]:
    name = f"{one.name} *" if chosen else one.name
    predicted = one.predicted
    if predicted is None or one.ratio is None or one.memory_bytes is None or predicted.step_s is None:
        return [name, "", "", "", "", "", "", one.refused]
    steps = f"{predicted.steps:.3g} ({predicted.least_steps:.3g} to {predicted.most_steps:.3g})"
    return [
        name,
        seconds(predicted.step_s),
        f"{1 / predicted.step_s:.3g}",
        amount(predicted.bytes or 0),
        f"{one.ratio:.2f}×",
        steps,
        f"≥ {amount(one.memory_bytes)}",
        "",
    ]


def seconds(value: float) -> str:
    """Return '31 ms' or '1.2 s'."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def amount(bytes: float) -> str:
    """Return '21 MB'."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes >= unit:
            return f"{bytes / unit:.3g} {name}"
    return f"{bytes:.0f} B"
