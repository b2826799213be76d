"""Presets of devices and models, from the tables of papers; what these do not print is assumed.

StellaTrain (2024), Table 2, prints alpha and beta: taken as they are. Cannikin (2024), Tables 3 to 5, names hardware,
models and their sizes, but no coefficients of any device: those here are ours, see `_SPEED` and `_cannikin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from atoll.errors import BadInput
from atoll.host.documents import did_you_mean

Preset = TypeVar("Preset")
FORWARD_SHARE: Final = 1 / 3
"""Share of a step's computing before its backward pass, where only the whole is known."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch x: load, forward and update q max(x, floor) + s, backward k max(x, floor) + m."""

    q: float
    s: float
    k: float
    m: float
    floor: float = 0.0

    @classmethod
    def saturating(cls, alpha: float, beta: float) -> Cost:
        """Return the cost of min(beta / alpha x, beta) samples a second. Source: StellaTrain (2024), Eq. 2."""
        return cls(FORWARD_SHARE / beta, 0.0, (1 - FORWARD_SHARE) / beta, 0.0, alpha)


class Model(NamedTuple):
    """entries: trained parameters. initial_batch: batch for which the paper tuned its learning rate; 0 if unknown.
    costs: by device."""

    entries: int
    initial_batch: int
    source: str
    costs: Mapping[str, Cost]


def _stellatrain(entries: int, **alpha_beta: tuple[float, float]) -> Model:
    """alpha_beta: by device, with underscores."""
    costs = {device.replace("_", "-"): Cost.saturating(*numbers) for device, numbers in alpha_beta.items()}
    return Model(entries, 0, "StellaTrain, section 5 and Table 2", costs)


def _cannikin(entries: int, initial_batch: int, sample_s: float, step_s: float) -> Model:
    """sample_s, step_s: seconds a sample and seconds a step of an RTX 6000: assumed. The seconds a step are for kernel
    launches and the optimizer, and do not shrink on a faster device."""
    each = {device: sample_s / speed for device, speed in _SPEED.items()}
    costs = {device: Cost(q=one / 3, s=step_s / 2, k=one * 2 / 3, m=step_s / 2) for device, one in each.items()}
    return Model(entries, initial_batch, "Cannikin, Table 5", costs)


_SPEED: Final[Mapping[str, float]] = {
    "rtx-a5000": 27.8 / 16.3,
    "rtx-a4000": 19.2 / 16.3,
    "quadro-p4000": 5.3 / 16.3,
    "a100": 3.42,
    "v100": 15.7 / 16.3,
    "rtx-6000": 1.0,
}
"""Speed relative to a Quadro RTX 6000: peak float32 rates of the data sheets, in Tflop/s. The A100 has the 3.42 of
Cannikin, section 6."""

MODELS: Final[Mapping[str, Model]] = {
    "resnet152": _stellatrain(58_000_000, rtx_2080_ti=(32, 118), rtx_3090=(48, 183), rtx_4090=(64, 270)),
    "vit-b-16": _stellatrain(88_000_000, rtx_2080_ti=(20, 99), rtx_3090=(32, 148), rtx_4090=(28, 300)),
    "swin-b": _stellatrain(139_000_000, rtx_2080_ti=(16, 80), rtx_3090=(36, 112), rtx_4090=(40, 217)),
    "resnet50": _cannikin(25_600_000, 100, 4.0e-3, 0.020),
    "resnet18": _cannikin(11_000_000, 64, 0.35e-3, 0.008),
    "deepspeech2": _cannikin(52_000_000, 12, 12e-3, 0.030),
    "bert": _cannikin(110_000_000, 9, 16e-3, 0.030),
    "neumf": _cannikin(5_200_000, 64, 0.002e-3, 0.004),
}
CLUSTERS: Final[Mapping[str, Mapping[str, int]]] = {
    "cannikin-a": {"rtx-a5000": 1, "rtx-a4000": 1, "quadro-p4000": 1},
    "cannikin-b": {"a100": 4, "v100": 4, "rtx-6000": 8},
}
"""Cannikin (2024), Tables 3 and 4: device presets and how many of each."""


def named(name: str, presets: Mapping[str, Preset], what: str) -> Preset:
    """Return the preset of this name. Raises BadInput."""
    require(name, presets, what)
    return presets[name]


def cost(device: str, model: str) -> Cost:
    """Return the cost of a device preset with a model preset. Raises BadInput naming what there is."""
    require(device, {name for one in MODELS.values() for name in one.costs}, "device preset")
    costs = named(model, MODELS, "model").costs
    if device not in costs:
        fit = ", ".join(sorted(costs))
        raise BadInput(f"no preset of device {device!r} with model {model!r}. With this model: {fit}")
    return costs[device]


def require(name: str, names: Iterable[str], what: str) -> None:
    """Raise BadInput with the nearest name for one that is not there."""
    if name not in (listed := sorted(names)):
        raise BadInput(f"no {what} {name!r}. {did_you_mean(name, listed)}")


def listed() -> list[tuple[str, str, str]]:
    """Return kind, name and description of every preset."""
    found = [
        ("cluster", name, ", ".join(f"{count} x {device}" for device, count in devices.items()))
        for name, devices in CLUSTERS.items()
    ]
    found += [("model", name, f"{one.entries / 1e6:g} M parameters ({one.source})") for name, one in MODELS.items()]
    for model, one in MODELS.items():
        for device, of in one.costs.items():
            if of.floor:
                what = f"alpha {of.floor:g}, beta {1 / (of.q + of.k):.4g} samples/s (StellaTrain, Table 2)"
            else:
                what = f"{1e3 * (of.q + of.k):.3g} ms a sample, {1e3 * (of.s + of.m):.3g} ms a step (assumed)"
            found.append(("device", f"{device} with {model}", what))
    return found
