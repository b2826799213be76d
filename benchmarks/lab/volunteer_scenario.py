"""Scenario file of `kind = "volunteers"`: sites of devices that stay or may vanish, a model in stages, links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from atoll.controller.planners.pipelines.allocation import (
    MAX_DEVICES,
    MAX_LAYERS,
    MAX_STAGES,
    AllocationDevice,
    AllocationInput,
)
from atoll.controller.simulator.scenario import Section

MAX_EVENTS: Final = 20_000_000
"""Micro-batches times devices of a scenario; more take minutes."""

F64 = NDArray[np.float64]
_Name = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")]
_Positive = Annotated[StrictFloat | StrictInt, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e6, allow_inf_nan=False)]
_Bytes = Annotated[StrictInt, Field(ge=0, le=2**50)]
_Share = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)]
_Range = tuple[_Positive, _Positive]


class SiteSection(Section):
    """`[[sites]]`: `count` sites of `devices` each, all alike."""

    name: _Name
    count: Annotated[StrictInt, Field(ge=1, le=MAX_DEVICES)] = 1
    devices: Annotated[StrictInt, Field(ge=1, le=MAX_DEVICES)] = 1
    power: _Positive = 1.0
    """Layer costs that a device computes in a second."""

    reliable: StrictBool = True
    mbit_s: _Positive = 16_000.0
    """Rate between two devices of the site."""

    delay_s: _Seconds = 0.0001


class BetweenSection(Section):
    """Links of each two sites (`[between]`), drawn evenly from these ranges, the same both ways."""

    mbit_s: _Range = (1000.0, 1000.0)
    delay_s: tuple[_Seconds, _Seconds] = (0.01, 0.01)

    @model_validator(mode="after")
    def _ordered(self) -> BetweenSection:
        for name, (low, high) in (("mbit_s", self.mbit_s), ("delay_s", self.delay_s)):
            if low > high:
                raise ValueError(f"{name} = {[low, high]} must be lowest and highest")
        return self


class VolunteerScenario(Section):
    """Whole scenario file."""

    kind: Literal["volunteers"]
    name: _Name = "volunteers"
    batch: Annotated[StrictInt, Field(ge=1, le=2**30)]
    """Samples of a step."""

    micro_batches: Annotated[StrictInt, Field(ge=1, le=100_000)]
    batches: Annotated[StrictInt, Field(ge=1, le=100_000)] = 30
    layers: Annotated[StrictInt, Field(ge=1, le=MAX_LAYERS)]
    layer_cost: _Positive
    """Cost of a sample, both passes."""

    activation_bytes: _Bytes
    """Bytes of a sample between two layers."""

    parameter_bytes: _Bytes
    """Bytes of the model's gradients on the wire."""

    max_stages: Annotated[StrictInt, Field(ge=1, le=MAX_STAGES)] = MAX_STAGES
    disconnect: _Share = 0.0
    """Probability that a volunteer is lost during a batch, at a time drawn evenly; it is back with the next one."""

    deadline: Annotated[StrictFloat | StrictInt, Field(ge=1, le=100, allow_inf_nan=False)] = 1.5
    """Expected times of a task after which a client without an answer counts as lost."""

    restart_s: _Seconds = 10.0
    """Seconds to set up a pipeline anew without a lost device."""

    policies: Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=8)] = (
        "dapple",
        "swarm",
        "volunteer",
        "alone",
    )
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    sites: Annotated[tuple[SiteSection, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    between: BetweenSection = BetweenSection()

    @model_validator(mode="after")
    def _fits(self) -> VolunteerScenario:
        devices = sum(site.count * site.devices for site in self.sites)
        if devices > MAX_DEVICES:
            raise ValueError(f"sites have {devices} devices; at most {MAX_DEVICES}. Lower count or devices")
        if not any(site.reliable for site in self.sites):
            raise ValueError("sites: none is reliable, and stages need a device that stays")
        if self.micro_batches > self.batch:
            raise ValueError(f"micro_batches = {self.micro_batches} is more than batch = {self.batch}. Lower it")
        events = self.batches * self.micro_batches * devices
        if events > MAX_EVENTS:
            raise ValueError(f"batches = {self.batches} is {events} micro-batches on devices; at most {MAX_EVENTS}")
        return self


@dataclass(frozen=True, slots=True)
class VolunteerCluster:
    """power_N in layer costs a second; delay_NN in seconds, bandwidth_NN in bytes a second."""

    power_N: F64
    reliable_N: NDArray[np.bool_]
    delay_NN: F64
    bandwidth_NN: F64

    @staticmethod
    def of(scenario: VolunteerScenario, seed: int) -> VolunteerCluster:
        """Return the scenario's cluster, with links between sites drawn from the seed."""
        sites = [site for site in scenario.sites for _ in range(site.count)]
        at_N = np.array([place for place, site in enumerate(sites) for _ in range(site.devices)])
        draw = np.random.default_rng([seed, 1])
        delay_SS = _drawn(draw, scenario.between.delay_s, [site.delay_s for site in sites])
        mbit_SS = _drawn(draw, scenario.between.mbit_s, [site.mbit_s for site in sites])
        return VolunteerCluster(
            np.array([float(sites[place].power) for place in at_N]),
            np.array([sites[place].reliable for place in at_N]),
            delay_SS[np.ix_(at_N, at_N)],
            mbit_SS[np.ix_(at_N, at_N)] * 125_000,
        )

    def reliable(self) -> VolunteerCluster:
        """Return the cluster without its volunteers."""
        stay = np.flatnonzero(self.reliable_N)
        both = np.ix_(stay, stay)
        return VolunteerCluster(self.power_N[stay], self.reliable_N[stay], self.delay_NN[both], self.bandwidth_NN[both])

    def allocation(self, scenario: VolunteerScenario) -> AllocationInput:
        """Return the input of planner `allocation` for a micro-batch, which passes a stage at once.

        A volunteer counts with the power that it brings in the mean of a batch."""
        micro = -(-scenario.batch // scenario.micro_batches)
        power_N = np.where(self.reliable_N, self.power_N, self.power_N * (1 - scenario.disconnect / 2))
        return AllocationInput(
            devices=tuple(
                AllocationDevice(power=float(power), reliable=bool(reliable))
                for power, reliable in zip(power_N, self.reliable_N, strict=True)
            ),
            delay=tuple(map(tuple, self.delay_NN.tolist())),
            bandwidth=tuple(map(tuple, self.bandwidth_NN.tolist())),
            activation_bytes=micro * scenario.activation_bytes,
            layer_costs=(float(scenario.layer_cost),) * scenario.layers,
            parameter_bytes=scenario.parameter_bytes // scenario.micro_batches,  # one aggregation for all of them
            batch=micro,
            max_stages=scenario.max_stages,
        )


def _drawn(draw: np.random.Generator, ends: tuple[float, float], within: list[float]) -> F64:
    drawn_SS = np.triu(draw.uniform(ends[0], ends[1], (len(within), len(within))), 1)
    both_SS: F64 = drawn_SS + drawn_SS.T
    np.fill_diagonal(both_SS, within)
    return both_SS
