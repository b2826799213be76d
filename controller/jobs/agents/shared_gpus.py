"""Decides whether an agent may have its GPUs: one of its own, or one that all its agents share by agreement."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.controller.state.records import DeviceRecord, NodeRecord


def refusal(node: NodeRecord, others: Mapping[str, NodeRecord]) -> str:
    """Return why an agent may not join beside `others`, the other live agents by name; empty where it may."""
    for device in node.devices:
        holders = {
            name: held
            for name, other in others.items()
            for held in other.devices
            if device.uuid and held.uuid == device.uuid
        }
        if holders and (why := _disagreement(device, holders)):
            name, held = next(iter(holders.items()))
            return (
                f"GPU {device.index} of {node.name!r} ({device.model}, {device.uuid}) is GPU {held.index} of the agent "
                f"{name!r}, from {others[name].address}{why}"
            )
    return ""


def _disagreement(device: DeviceRecord, holders: Mapping[str, DeviceRecord]) -> str:
    """Return how the sentence ends that refuses `device` beside those who have it; empty where they agree."""
    number, theirs = max(1, device.sharers), {max(1, held.sharers) for held in holders.values()}
    agreed = max(theirs)
    if theirs == {number} and number > len(holders):
        return ""
    if number == agreed == 1:
        return (
            ": two jobs would share it. Stop one of both, leave each its own GPUs with CUDA_VISIBLE_DEVICES, or start "
            "both with --share-gpu 2"
        )
    if agreed == 1:
        return f", which has it for itself. Start that agent with --share-gpu {number} too, or stop it"
    if number == agreed:
        return (
            f"; {agreed} agents may share it, and {', '.join(sorted(holders))} do. Stop one of them, or start all "
            f"with --share-gpu {agreed + 1}"
        )
    return (
        f", which shares it as one of {agreed} agents. Give this agent --share-gpu {agreed}, or leave it its own GPUs "
        "with CUDA_VISIBLE_DEVICES"
    )
