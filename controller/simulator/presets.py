"""Presets of devices and models, from the tables of papers; what these do not print is assumed.

StellaTrain (2024), Table 2, prints alpha and beta: taken as they are. Cannikin (2024), Tables 3 to 5, names hardware,
models and their sizes, but no coefficients of any device: those here are ours, see `_SPEED` and `_WORK`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from atoll.controller.simulator.devices import Cost
from atoll.controller.simulator.scenario import DeviceSection
from atoll.errors import BadInput
from atoll.host.documents import did_you_mean


@dataclass(frozen=True, slots=True)
class Model:
    """entries: trained parameters. initial_batch: batch for which the paper tuned its learning rate; 0 if unknown."""

    entries: int
    initial_batch: int
    source: str


MODELS: Final[Mapping[str, Model]] = {
    "resnet152": Model(58_000_000, 0, "StellaTrain, section 5 and Table 2"),
    "vit-b-16": Model(88_000_000, 0, "StellaTrain, section 5 and Table 2"),
    "swin-b": Model(139_000_000, 0, "StellaTrain, section 5 and Table 2"),
    "resnet50": Model(25_600_000, 100, "Cannikin, Table 5"),
    "resnet18": Model(11_000_000, 64, "Cannikin, Table 5"),
    "deepspeech2": Model(52_000_000, 12, "Cannikin, Table 5"),
    "bert": Model(110_000_000, 9, "Cannikin, Table 5"),
    "neumf": Model(5_200_000, 64, "Cannikin, Table 5"),
}

_ALPHA_BETA: Final[Mapping[tuple[str, str], tuple[float, float]]] = {
    ("rtx-2080-ti", "resnet152"): (32, 118),
    ("rtx-3090", "resnet152"): (48, 183),
    ("rtx-4090", "resnet152"): (64, 270),
    ("rtx-2080-ti", "vit-b-16"): (20, 99),
    ("rtx-3090", "vit-b-16"): (32, 148),
    ("rtx-4090", "vit-b-16"): (28, 300),
    ("rtx-2080-ti", "swin-b"): (16, 80),
    ("rtx-3090", "swin-b"): (36, 112),
    ("rtx-4090", "swin-b"): (40, 217),
}

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

_WORK: Final[Mapping[str, tuple[float, float]]] = {
    "resnet50": (4.0e-3, 0.020),
    "resnet18": (0.35e-3, 0.008),
    "deepspeech2": (12e-3, 0.030),
    "bert": (16e-3, 0.030),
    "neumf": (0.002e-3, 0.004),
}
"""Seconds a sample and seconds a step of an RTX 6000: assumed. The seconds a step are for kernel launches and the
optimizer, and do not shrink on a faster device."""

CLUSTERS: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "cannikin-a": (("rtx-a5000", 1), ("rtx-a4000", 1), ("quadro-p4000", 1)),
    "cannikin-b": (("a100", 4), ("v100", 4), ("rtx-6000", 8)),
}
"""Cannikin (2024), Tables 3 and 4: device presets and how many of each."""


def model(name: str) -> Model:
    """Return the preset of this name. Raises BadInput."""
    known(name, MODELS, "model")
    return MODELS[name]


def devices_of(cluster: str) -> list[DeviceSection]:
    """Return the sections that a scenario could have in place of `cluster`. Raises BadInput."""
    known(cluster, CLUSTERS, "cluster")
    return [DeviceSection(preset=name, count=count) for name, count in CLUSTERS[cluster]]


def cost(device: str, model: str) -> Cost:
    """Return the cost of a device preset with a model preset. Raises BadInput naming what there is."""
    known(device, {name for name, _ in _ALPHA_BETA} | set(_SPEED), "device preset")
    known(model, MODELS, "model")
    if found := _ALPHA_BETA.get((device, model)):
        return Cost.saturating(*found)
    if device not in _SPEED or model not in _WORK:
        fit = sorted({name for name, of in _ALPHA_BETA if of == model} | (set(_SPEED) if model in _WORK else set()))
        raise BadInput(f"no preset of device {device!r} with model {model!r}. With this model: {', '.join(fit)}")
    sample_s, step_s = _WORK[model]
    sample_s /= _SPEED[device]
    return Cost(q=sample_s / 3, s=step_s / 2, k=sample_s * 2 / 3, m=step_s / 2)


def known(name: str, names: Iterable[str], what: str) -> None:
    """Raise BadInput with the nearest name for one that is not there."""
    if name not in (listed := sorted(names)):
        raise BadInput(f"no {what} {name!r}. {did_you_mean(name, listed)}")


def listed() -> list[dict[str, object]]:
    """Return every preset as `atoll simulate --list-presets` shows it."""
    found: list[dict[str, object]] = [
        {"kind": "cluster", "name": name, "what": ", ".join(f"{count} x {device}" for device, count in devices)}
        for name, devices in CLUSTERS.items()
    ]
    found += [
        {"kind": "model", "name": name, "what": f"{model.entries / 1e6:g} M parameters ({model.source})"}
        for name, model in MODELS.items()
    ]
    for device, model_name in [*_ALPHA_BETA, *((device, model) for device in _SPEED for model in _WORK)]:
        of = cost(device, model_name)
        if of.floor:
            what = f"alpha {of.floor:g}, beta {1 / (of.q + of.k):.4g} samples/s (StellaTrain, Table 2)"
        else:
            what = f"{1e3 * (of.q + of.k):.3g} ms a sample, {1e3 * (of.s + of.m):.3g} ms a step (assumed)"
        found.append({"kind": "device", "name": f"{device} with {model_name}", "what": what})
    return found
