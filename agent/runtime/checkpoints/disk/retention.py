"""Chooses the checkpoints that stay: the newest few, and those kept for good."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.agent.runtime.checkpoints.disk.disk_errors import disk_errors
from atoll.agent.runtime.checkpoints.disk.fence import locked
from atoll.agent.runtime.checkpoints.disk.folders import Moment, by_age, discard
from atoll.errors import CheckpointError


def retained(present: Collection[Moment], keep: int, keep_every_steps: int = 0) -> set[Moment]:
    """Return the checkpoints that stay: the newest `keep`, and the first at or after each multiple of keep_every_steps.

    With gradient accumulation a checkpoint may come a little after the multiple, so the exact step is not required. Of
    equal steps the newest run's counts: training continued from it. keep_every_steps: 0 keeps none for good."""
    if keep < 1:
        raise CheckpointError(f"keep = {keep} would remove every checkpoint; it must be at least 1")
    stay = set(sorted(present, reverse=True)[:keep])
    if keep_every_steps:
        firsts: dict[int, Moment] = {}
        for moment in sorted(present, key=lambda one: (one.step, -one.run)):
            if moment.step >= keep_every_steps:
                firsts.setdefault(moment.step // keep_every_steps, moment)
        stay.update(firsts.values())
    return stay


def keep_newest(
    directory: Path,
    keep: int,
    keep_every_steps: int = 0,
    in_use: Set[Moment] = frozenset(),
    sound: Moment | None = None,
) -> list[Path]:
    """Remove what `retained` does not name; the newest sound one stays in any case, and what is in use. Returns what
    went.

    sound: one that the caller has just written, so that none needs to be read. Else the newest are read until one is
    sound; others may use the directory meanwhile."""
    present = by_age(directory)
    if not present.keys() - retained(present, keep, keep_every_steps) - in_use:
        return []
    if sound not in present:
        sound = next((moment for moment, path in present.items() if listing.is_sound(path)), None)
    stay = in_use | ({sound} if sound is not None else set())
    with locked(directory):
        present = by_age(directory)
        stay = stay | retained(present, keep, keep_every_steps)
        surplus = [path for moment, path in present.items() if moment not in stay]
        with disk_errors(f"removing old checkpoints in {directory}"):
            for path in surplus:
                discard(path)
    return surplus
