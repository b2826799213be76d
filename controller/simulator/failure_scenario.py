"""A scenario file about failures: machines that fail, where checkpoints are kept, what a recovery costs."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictFloat, StrictInt, StrictStr, model_validator

from atoll.controller.simulator.failures import FailureRates
from atoll.controller.simulator.scenario import Section, check

MAX_MACHINES: Final = 10_000
MAX_FAILURES: Final = 1_000_000
"""Expected in a scenario; more than a few seconds of work."""

_Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Positive = Annotated[StrictFloat | StrictInt, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Rate = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1000, allow_inf_nan=False)]


class FailuresSection(Section):
    """`[failures]`: how often what fails."""

    machine_per_day: _Rate = 0.015
    """Of each machine. 0.015 is what OPT-175B saw."""

    hardware: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share that takes the machine's memory along; the rest ends a process only."""

    rack_per_day: _Rate = 0.0
    rack_machines: Annotated[StrictInt, Field(ge=0, le=MAX_MACHINES)] = 0
    """Consecutive machines that fail together. The placement knows them."""

    @model_validator(mode="after")
    def _racks(self) -> FailuresSection:
        if self.rack_per_day and not self.rack_machines:
            raise ValueError("has rack_per_day and needs rack_machines too")
        return self


class MemorySection(Section):
    """`[memory]`: checkpoints in CPU memory, every step or as often as they can be written."""

    write_s: _Seconds = 1.0
    """From a step's end until all replicas are complete, beside training."""

    save_s: _Seconds = 0.0
    """On a recovery: writing out what is in memory before processes restart."""

    retrieve_s: _Seconds = 3.0
    """From a peer, for a machine that lost its memory. From its own memory a process takes no time."""


class PersistentSection(Section):
    """`[persistent]`: the store that every machine writes to."""

    every_s: _Positive = 10_800.0
    pause_s: _Seconds = 0.0
    """For which a checkpoint stops training."""

    write_s: _Seconds = 480.0
    retrieve_s: _Seconds = 480.0


class RecoverySection(Section):
    """`[recovery]`: what any failure costs beside what was lost."""

    detect_s: _Seconds = 3.0
    restart_s: _Seconds = 5.0
    replace_s: _Seconds = 300.0
    """Until another machine is there for one that is lost, where no standby is left."""

    standbys: Annotated[StrictInt, Field(ge=0, le=MAX_MACHINES)] = 1


class FailureScenario(Section):
    """The whole file. `kind` tells it from a scenario of devices and batches."""

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
        rates = self.failures
        racks = -(-self.machines // rates.rack_machines) if rates.rack_machines else 0
        expected = self.days * (self.machines * rates.machine_per_day + racks * rates.rack_per_day)
        if expected > MAX_FAILURES:
            raise ValueError(f"days = {self.days:g} holds {expected:g} failures; at most {MAX_FAILURES}. Lower it")
        steps = self.days * 86_400 / self.step_s
        if steps > 1e10:
            raise ValueError(f"days = {self.days:g} holds {steps:g} steps; at most 1e10. Lower it")
        return self

    def rates(self) -> FailureRates:
        given = self.failures
        return FailureRates(given.machine_per_day, given.hardware, given.rack_per_day, given.rack_machines)


def parse(document: dict[str, Any], where: str) -> FailureScenario:
    """Raises BadInput for the first field that is wrong."""
    return check(FailureScenario, document, where)
