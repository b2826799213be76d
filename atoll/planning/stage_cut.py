"""Cuts a model's layers into stages for unequal devices in a given order.

The planner behind `atoll decide stages`, and what workers ask before they build their stages: both rooms read it here.

The stages of SDPipe (Miao et al., 2023), which takes the cut as given; the search is ours: dynamic programming over
prefixes of layers, exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from atoll.errors import NoFeasiblePlan
from atoll.planning.schemas import BytesPerSecond, Schema, Seconds

MAX_LAYERS = 2_000
MAX_DEVICES = 256

F64 = NDArray[np.float64]
Memory = Annotated[int, Field(ge=0, le=2**50)]


class StageLayer(Schema):
    """Cost of one layer for one micro-batch, in seconds of a device with speed 1. parameter_bytes: all that the
    layer keeps. activation_bytes: its output."""

    forward_s: Seconds
    backward_s: Seconds
    parameter_bytes: Memory
    activation_bytes: Memory


class StageDevice(Schema):
    """speed: how many times as fast as the device on which the layers were measured."""

    speed: Annotated[float, Field(ge=1e-6, le=1e6)]
    memory_bytes: Memory


class StageLink(Schema):
    """Link between two neighbours; the same both ways."""

    bandwidth: BytesPerSecond
    latency: Seconds


class StagesInput(Schema):
    """devices: one stage each, in the order of the pipeline. links[i] joins devices i and i + 1."""

    layers: Annotated[tuple[StageLayer, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    devices: Annotated[tuple[StageDevice, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    links: Annotated[tuple[StageLink, ...], Field(max_length=MAX_DEVICES)]

    @model_validator(mode="after")
    def _agrees(self) -> StagesInput:
        if len(self.links) != len(self.devices) - 1:
            raise ValueError(
                f"field links has {len(self.links)}, and there are {len(self.devices)} devices. Give one for each two "
                "neighbours"
            )
        return self


@dataclass(frozen=True, slots=True)
class StagesPlan:
    """cuts: the first layer of each stage. bottleneck_s: seconds of a micro-batch, both passes, on the slowest stage or
    link."""

    cuts: tuple[int, ...]
    bottleneck_s: float


def plan_stages(given: StagesInput) -> StagesPlan:
    """The cut whose slowest stage or link is fastest; at least one layer a stage. Exact. O(devices · layers²).

        stage: sum of (forward + backward) / speed    link: 2 (latency + activation of the last layer / bandwidth)

    Of equal cuts the one with the shorter earlier stages. Raises NoFeasiblePlan where there are more devices than
    layers, or where no cut fits the memory."""
    if len(given.devices) > len(given.layers):
        raise NoFeasiblePlan(
            f"{len(given.devices)} stages need as many layers; there are {len(given.layers)}. Leave devices out, or "
            "split the model finer"
        )
    compute_L1 = np.cumsum([0.0, *(layer.forward_s + layer.backward_s for layer in given.layers)])
    memory_L1 = np.cumsum([0, *(layer.parameter_bytes for layer in given.layers)])
    later_LL = np.tri(len(compute_L1), k=-1, dtype=bool)  # [end, begin]
    reached_L1 = np.full(len(compute_L1), np.inf)  # of the first so many layers on the devices so far
    reached_L1[0] = 0
    cuts = []
    for device, entered_L1 in zip(given.devices, _link_times(given), strict=True):
        stage_LL = (compute_L1[:, None] - compute_L1[None, :]) / device.speed
        fits_LL = later_LL & (memory_L1[:, None] - memory_L1[None, :] <= device.memory_bytes)
        before_L1 = np.maximum(reached_L1, entered_L1)
        slowest_LL = np.where(fits_LL, np.maximum(stage_LL, before_L1[None, :]), np.inf)
        cuts.append(slowest_LL.argmin(axis=1))
        reached_L1 = slowest_LL.min(axis=1)
    if not np.isfinite(reached_L1[-1]):
        raise NoFeasiblePlan(_too_large(given))
    return StagesPlan(_followed_back(cuts), float(reached_L1[-1]))


def _link_times(given: StagesInput) -> list[F64]:
    """Return each device's [L + 1] seconds on the link to it, by its first layer; nothing comes to the first device."""
    activation_L = np.array([layer.activation_bytes for layer in given.layers], dtype=np.float64)
    into = [2 * (link.latency + activation_L / link.bandwidth) for link in given.links]
    return [np.zeros(len(activation_L) + 1), *(np.concatenate([[0.0], seconds_L]) for seconds_L in into)]


def _followed_back(cuts: list[NDArray[np.intp]]) -> tuple[int, ...]:
    end, firsts = -1, []
    for begin_L1 in reversed(cuts):
        end = int(begin_L1[end])
        firsts.append(end)
    return tuple(reversed(firsts))


def _too_large(given: StagesInput) -> str:
    have, need = sum(d.memory_bytes for d in given.devices), sum(layer.parameter_bytes for layer in given.layers)
    largest = max(range(len(given.layers)), key=lambda i: given.layers[i].parameter_bytes)
    return (
        f"no cut fits the memory: the layers keep {need} bytes, the devices have {have}; the largest layer, "
        f"layers[{largest}], keeps {given.layers[largest].parameter_bytes}. Add devices, put the larger ones where the "
        "larger layers are, or let a layer keep less"
    )
