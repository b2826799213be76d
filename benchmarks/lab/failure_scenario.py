"""Scenario file of `kind = "failures"`: rates of failures, tiers of checkpoints, and the costs of a recovery."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictFloat, StrictInt, StrictStr, model_validator

from atoll.controller.simulator.scenario import Section

MAX_MACHINES: Final = 10_000
MAX_EXPECTED_FAILURES: Final = 1_000_000
"""Failures expected in a scenario; more take more than a few seconds."""

_Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Positive = Annotated[StrictFloat | StrictInt, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Rate = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1000, allow_inf_nan=False)]


class FailuresSection(Section):
    """`[failures]`: rates of Poisson processes."""

    machine_per_day: _Rate = 0.015
    """Failures of a machine and day. OPT-175B saw 0.015."""

    hardware: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share that takes the machine's memory along; the rest ends a process only."""

    rack_per_day: _Rate = 0.0
    """Failures of a rack and day, which take the memory of all its machines."""

    rack_machines: Annotated[StrictInt, Field(ge=0, le=MAX_MACHINES)] = 0
    """Consecutive machines of a rack; 0: there are no racks. The placement knows them."""

    @model_validator(mode="after")
    def _racks(self) -> FailuresSection:
        if self.rack_per_day and not self.rack_machines:
            raise ValueError("has rack_per_day and needs rack_machines too")
        return self

    def racks(self, machines: int) -> int:
        return -(-machines // self.rack_machines) if self.rack_machines else 0


class MemorySection(Section):
    """`[memory]`: checkpoints in CPU memory, every step or as often as they can be written."""

    write_s: _Seconds = 1.0
    """Seconds from a step's end until all replicas are complete, beside training."""

    save_s: _Seconds = 0.0
    """Seconds to write out the memory on a recovery, before processes restart."""

    retrieve_s: _Seconds = 3.0
    """Seconds to restore from a peer. A process restores from its own memory at once."""


class PersistentSection(Section):
    """`[persistent]`: the store that every machine writes to."""

    every_s: _Positive = 10_800.0
    pause_s: _Seconds = 0.0
    """Seconds for which a checkpoint stops training."""

    write_s: _Seconds = 480.0
    retrieve_s: _Seconds = 480.0


class RecoverySection(Section):
    """`[recovery]`: costs of any failure beside the work that was lost."""

    detect_s: _Seconds = 3.0
    restart_s: _Seconds = 5.0
    replace_s: _Seconds = 300.0
    """Seconds until another machine is there for a lost one, where no standby is left."""

    standbys: Annotated[StrictInt, Field(ge=0, le=MAX_MACHINES)] = 1


class FailureScenario(Section):
    """Scenario file of `kind = "failures"`."""

    kind: Literal["failures"]
    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")] = "failures"
    machines: Annotated[StrictInt, Field(ge=1, le=MAX_MACHINES)]
    replicas: Annotated[StrictInt, Field(ge=1, le=16)] = 2
    days: Annotated[StrictFloat | StrictInt, Field(gt=0, le=100_000, allow_inf_nan=False)] = 100.0
    step_s: _Positive
    policies: Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=32)] = (
        "memory",
        "storage-often",
        "storage-seldom",
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    failures: FailuresSection = FailuresSection()
    memory: MemorySection = MemorySection()
    persistent: PersistentSection = PersistentSection()
    recovery: RecoverySection = RecoverySection()

    @model_validator(mode="after")
    def _fits(self) -> FailureScenario:
        if self.replicas > self.machines:
            raise ValueError(f"replicas = {self.replicas} needs as many machines; there are {self.machines}")
        rates, racks = self.failures, self.failures.racks(self.machines)
        expected = self.days * (self.machines * rates.machine_per_day + racks * rates.rack_per_day)
        if expected > MAX_EXPECTED_FAILURES:
            raise ValueError(
                f"days = {self.days:g} holds {expected:g} failures; at most {MAX_EXPECTED_FAILURES}. Lower it"
            )
        steps = self.days * 86_400 / self.step_s
        if steps > 1e10:
            raise ValueError(f"days = {self.days:g} holds {steps:g} steps; at most 1e10. Lower it")
        return self
