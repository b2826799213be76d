"""Admits devices: every one whose time has come, or those that the controller's admission takes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.controller.estimators.profile import Profile
from atoll.controller.jobs.admission.admitting import AdmissionQuestion, RatedDevice, answer
from atoll.controller.simulator.cluster import Cluster
from atoll.controller.simulator.devices import SimulatedDevice

ASSESS_EVERY_S: Final = 10.0
"""As the controller has it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a device that offered itself: the first, and its admission."""

    at_s: float
    device: str
    admitted: bool
    reason: str


class Joining:
    """Devices that are there from the beginning need no admission."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        asked = cluster.scenario.admission
        self._admitted = {device.name for device in cluster.devices if device.joins_s == 0 or not asked}
        self._assessed_s = 0.0
        self.verdicts: list[Verdict] = []

    def present(self, now_s: float) -> tuple[SimulatedDevice, ...]:
        return tuple(d for d in self._there(now_s) if d.name in self._admitted)

    def assess(
        self,
        now_s: float,
        profile: Profile,
        members: Sequence[SimulatedDevice],
        *,
        learned: Mapping[str, float],
        speeds: Mapping[str, float],
        split: str,
    ) -> None:
        """Admit the devices with which the run is predicted to be faster. learned: seconds per sample, by device."""
        offers = [device for device in self._there(now_s) if device.name not in self._admitted]
        if not offers or now_s < self._assessed_s + ASSESS_EVERY_S:
            return
        found = answer(
            AdmissionQuestion(
                profile=profile,
                workers=[_measured(device, speeds) for device in members],
                offers=[_measured(device, speeds) for device in offers],
                learned=learned,
                split=split,
                batch_range=None,
                restart_s=self._cluster.scenario.restart_s,
            )
        )
        if found is None:
            return
        self._assessed_s = now_s
        for name, reason in found.admitted.items():
            self._admitted.add(name)
            self.verdicts.append(Verdict(now_s, name, True, reason))
        told = {verdict.device for verdict in self.verdicts}
        for name, reason in found.waiting.items():
            if name not in told:
                self.verdicts.append(Verdict(now_s, name, False, reason))

    def _there(self, now_s: float) -> list[SimulatedDevice]:
        return [device for device in self._cluster.devices if device.joins_s <= now_s < device.leaves_s]


def _measured(device: SimulatedDevice, speeds: Mapping[str, float]) -> RatedDevice:
    """What an agent measures of a device with a fixed calculation: samples a second, as far as they are its own."""
    return RatedDevice(device.name, speeds[device.name] / (device.cost.q + device.cost.k))
