"""Stage 6: what trains on the device trains as plain torch does on the same device.

Rows are cases of the conformance matrix that a CPU cannot show: its program, models, optimizers and data."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from case_worker import Atoll
from cases import Case
from deviations import deviation
from program import Plain, train

from gpu_check.atoll_runs import import_everything, join_one_rank
from gpu_check.rows import Measured, Rows

CASE_LIMIT_S: Final = 60.0
DEVIATION: Final = {"float32": 2e-3, "autocast": 0.05, "float16": 0.05}
"""Largest distance from plain torch, as a share of the way that plain torch went, by the forward pass's precision."""
WAYS: Final[Mapping[str, tuple[str, bool]]] = {
    "dense": ("dense", False),
    "dense, group of one": ("dense", True),
    "local-steps": ("local-steps/exact", False),
}
"""A strategy of the matrix, and whether the run has a process group of one rank."""


@dataclass(frozen=True, slots=True, order=True)
class DeviceCase(Case):
    optimizer: str = "sgd-momentum"
    event: str = "one-worker"
    mode: str = ""
    """The mode of torch.compile; empty where the model is not compiled."""
    gpu_only: bool = False

    def __str__(self) -> str:
        wrapper = () if self.wrapper == "plain" else (self.wrapper,)
        return ", ".join((self.feature, self.optimizer, self.precision, *wrapper, *filter(None, (self.mode,))))

    @property
    def compiler(self) -> Mapping[str, str]:
        return {"mode": self.mode}


CASES: Final = (
    DeviceCase(),
    DeviceCase(feature="channels-last", optimizer="adamw-fused"),
    DeviceCase(feature="odd-layouts", optimizer="sgd-fused"),
    DeviceCase(optimizer="adamw-fused", precision="float16"),
    DeviceCase(feature="channels-last", optimizer="adamw-fused", precision="autocast"),
    DeviceCase(optimizer="adamw-capturable", gpu_only=True),
    DeviceCase(feature="lstm", optimizer="adam"),
    DeviceCase(feature="embedding", optimizer="adamw-fused"),
    DeviceCase(optimizer="adamw-fused", wrapper="no-sync"),
    DeviceCase(wrapper="compile", mode="reduce-overhead", gpu_only=True),
)


def run(device: str, rows: Rows) -> None:
    import_everything()
    for case in CASES:
        if case.gpu_only and device == "cpu":
            rows.skip(str(case), "it needs a GPU")
        else:
            rows.measure(str(case), partial(_compared, case, device), CASE_LIMIT_S)


def _compared(case: DeviceCase, device: str) -> Measured:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain = train(case, Plain(case, device=device))
    assert all(bool(one.isfinite().all()) for one in plain.end.values()), "plain torch ends with weights not finite"
    found = {}
    for way, (strategy, grouped) in WAYS.items():
        driver = Alone(replace(case, strategy=strategy), grouped=grouped)
        with contextlib.closing(driver.run):
            trained = train(case, driver)
        assert all(torch.equal(trained.start[name], one) for name, one in plain.start.items()), "starts differ"
        found[way] = max(deviation(trained.end[name], one, plain.start[name]) for name, one in plain.end.items())
    text = ", ".join(f"{way} {one:.1e}" for way, one in found.items())
    return max(found.values()) <= DEVIATION[case.precision], f"off by {text}", found


class Alone(Atoll):
    """The matrix's worker without an agent: a run of one rank, with or without a process group."""

    def __init__(self, case: Case, *, grouped: bool) -> None:
        super().__init__(case, 1, Path("no-agent"))
        if grouped:
            join_one_rank(self.run)

    def begin_step(self, step: int) -> None:
        pass
