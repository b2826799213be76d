"""Writes docs/supported.md from the conformance table."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cases import AXES, STRATEGIES, Case, Exact, Refused, expected, impossible, inexact
from deviations import BEHIND, CLOSE

PAGE: Final = Path(__file__).parents[2] / "docs" / "supported.md"

HEAD: Final = """# What is supported

This page is generated from the table of the conformance suite (`tests/conformance/`). For each cell two real workers
train a small model through Atoll's public calls, and plain PyTorch trains the same program in one process on whole
batches, without Atoll. `make test` runs cases that cover every pair of values; `make test-long` adds workers that are
lost or join, volunteers, compiled models, loader processes and the trainers of Hugging Face, Lightning and Accelerate,
which are compared with the same trainer alone. `groups` and `volunteer` make passes and updates themselves: their
workers call [`run.prepare_pipeline`](training.md), and a wrapper that needs a loop of the script's own is refused. Any
cell can be tried by hand:

```
.venv/bin/python scripts/conformance strategy=local-steps feature=lstm optimizer=adamw precision=autocast
.venv/bin/python scripts/conformance --sample 50 --seed 7
```

| mark | meaning |
|---|---|
| = | The weights are those of plain PyTorch up to the order of additions and the rounding of the precision. |
| ≈ | All ranks end with equal weights, and the loss is close to those of three seeds of PyTorch. A note says why. |
| ↻ | The survivors save the last step and the run starts again from it, then = or ≈ holds. |
| ✗ | `run.prepare` refuses it with an error that names the cause. |
| ✗ later | The script or the model does it after `run.prepare`. That call or pass is refused in the same way. |
| – | PyTorch itself cannot train it, it needs a GPU, or the strategy has no such event. |

Each table changes one value of the base case: an MLP, SGD, float32, two workers with equal shares. A name such as
`local-steps/exact` means settings that leave nothing out: `density = 1`, `values = "float32"`, `staleness = 0`. In
`groups/exact` all replicas average after each update (`grouping = "all"`), and a round is one update of each.

A loss is close if it lies behind the worst of the three seeds by at most a share of what PyTorch gains in these twelve
steps. A share is the largest that was measured and one step more. In so few steps, what a strategy sends late or leaves
for later steps is a large part. `local-steps` and `stale-sparse` add up updates that each rank made with its own
samples. There a loss may also lie as far behind as PyTorch that trains one rank's samples alone.

{behind}
- {close}: all others

The events "lost" and "join" change who trains in mid-run, in the same processes: the last of three workers is killed
(SIGKILL) in a step, or a third worker joins two at a step's boundary. No copy of the state is kept in other machines'
memory here (`memory_replicas = 1`); [membership](membership.md) says what each strategy does with one. A script that
writes trained weights between steps ("clamped") starts again from its last checkpoint where a worker is lost, under
`dense`, `zen`, `groups` and `volunteer`; that is not in the tables. In the event "helped" a volunteer makes passes of
every step in the first worker's place.
"""


def page() -> str:
    behind = "\n".join(
        f"- {share:.0%}: {', '.join(f'`{strategy}`' for strategy in BEHIND if BEHIND[strategy] == share)}"
        for share in sorted(set(BEHIND.values()), reverse=True)
    )
    head = HEAD.replace("{behind}", behind).replace("{close}", f"{CLOSE:.0%}")
    reasons: list[str] = []
    tables = [_table(axis, reasons) for axis in AXES if axis != "strategy"]
    notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([head, *tables, "## Why a cell is not exact\n", *notes]) + "\n"


def _table(axis: str, reasons: list[str]) -> str:
    rows = []
    for value in AXES[axis]:
        marks = [_mark(Case(strategy=strategy, **{axis: value}), reasons) for strategy in STRATEGIES]
        rows.append(f"| {value} | {' | '.join(marks)} |")
    head = [f"## By {axis}\n", f"| {axis} | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}"]
    return "\n".join([*head, *rows, ""])


def _mark(case: Case, reasons: list[str]) -> str:
    if impossible(case):
        return "–"
    again = "↻ " if case.starts_again else ""
    match expected(case):
        case Refused(at_prepare):
            return "✗" if at_prepare else "✗ later"
        case Exact():
            return f"{again}="
    reason = inexact(case)
    if reason not in reasons:
        reasons.append(reason)
    return f"{again}≈ {reasons.index(reason) + 1}"
