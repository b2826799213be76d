"""Planners by name, and their JSON form: text in, text out, the same bytes for the same input.

This is what `atoll plan NAME` runs, and what the controller runs and records: a recorded input gives its output again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from atoll.controller.planners import checkpoint_forms, forms
from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class Planner:
    """One planner. `example` is a valid input, shown by `atoll plan`."""

    name: str
    summary: str
    example: str
    plan: Callable[[dict[str, Any]], dict[str, Any]]

    def run_json(self, text: str) -> str:
        """Plan from JSON to JSON (sorted keys, no line break). Raises BadInput naming the field, or NoFeasiblePlan."""
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"the input of planner {self.name} is not JSON: {error}. Example: {self.example}") from error
        if not isinstance(data, dict):
            raise BadInput(f"the input of planner {self.name} must be a JSON object. Example: {self.example}")
        return canonical(self.plan(data))


def canonical(data: Mapping[str, Any]) -> str:
    """JSON with sorted keys and shortest floats: equal data is equal text."""
    return json.dumps(data, sort_keys=True, allow_nan=False)


def _no_constant(name: str) -> float:
    raise BadInput(f"{name} is not a number that can be planned with. Give finite numbers")


_TWO_NODES: Final = (
    '"gamma": 0.2, "t_o": 0.03, "t_u": 0.005, "nodes": [{"q": 0.0002, "s": 0.004, "k": 0.0004, "m": 0.002}, '
    '{"q": 0.0006, "s": 0.004, "k": 0.0012, "m": 0.002, "max_batch": 64}]'
)

PLANNERS: Final[Mapping[str, Planner]] = {
    planner.name: planner
    for planner in (
        Planner(
            "even",
            "the same batch for every node, within bounds",
            '{"total_batch": 256, "nodes": 3}',
            forms.even,
        ),
        Planner(
            "inverse-time",
            "batches in inverse proportion to each node's time per sample",
            '{"total_batch": 256, "nodes": [{"seconds_per_sample": 0.001}, {"seconds_per_sample": 0.002}]}',
            forms.inverse_time,
        ),
        Planner(
            "optperf",
            "the split with the shortest step, from each node's fixed and per-sample times and what overlaps",
            f'{{"total_batch": 256, {_TWO_NODES}}}',
            forms.optperf,
        ),
        Planner(
            "gns",
            "the gradient noise scale, from squared norms of nodes with unequal batches",
            '{"batches": [48, 16], "local_sqnorms": [1.5, 2.5], "global_sqnorm": 1.25}',
            forms.gns,
        ),
        Planner(
            "goodput",
            "the total batch that learns fastest, its split, and the learning rate's factor",
            f'{{"candidates": [128, 256, 512], "noise_scale": 900, "initial_batch": 128, {_TWO_NODES}}}',
            forms.goodput,
        ),
        Planner(
            "tta",
            "compression rate and batches for the least time to accuracy over thin links",
            '{"devices": [{"alpha": 28, "beta": 300, "max_batch": 128}, {"alpha": 20, "beta": 99, "max_batch": 64, '
            '"island": 1}], "bandwidths": [12500000, 12500000], "entries": 86000000, "samples": 1000000, "surrogate": '
            '{"rates": [0.9, 0.99, 0.999], "batches": [32, 128, 512], '
            '"extra": [[0.0, 0.01, 0.1], [0.02, 0.04, 0.15], [0.1, 0.2, 0.4]]}}',
            forms.tta,
        ),
        Planner(
            "admission",
            "which of the devices that offer themselves make the run faster, and why",
            f'{{"candidates": [256], "noise_scale": 900, "initial_batch": 256, "uncertainty": 0.03, {_TWO_NODES}, '
            '"offers": [{"name": "slow", "q": 0.01, "s": 0.1, "k": 0.02, "m": 0.05, "uncertainty": 0.05}]}',
            forms.admission,
        ),
        Planner(
            "placement",
            "whose memory holds the replicas of whose checkpoint, and how probable recovery from memory is",
            '{"machines": [{"host": "a"}, {"host": "a"}, {"host": "b"}, {"host": "b"}], "replicas": 2}',
            checkpoint_forms.placement,
        ),
        Planner(
            "chunks",
            "when a checkpoint is sent: in chunks that fit between the training's own traffic",
            '{"idle_spans": [0.05, 0.2, 0.1], "checkpoint_bytes": 30000000, "replicas": 2, "buffers": 4, '
            '"buffer_bytes": 32000000, "bandwidth": 125000000, "alpha": 0.0005, "mu": 0.9}',
            checkpoint_forms.chunks,
        ),
    )
}
