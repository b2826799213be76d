"""Sums of waiting times of groups, in words: planner `groups` reports them of its replay, and `atoll events` of a
run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from atoll.controller.planners.pipelines.group_rounds import RoundGroup

MAX_NAMED_REPLICAS: Final = 3
"""Number of replicas that a sentence names."""


@dataclass(slots=True)
class StageWaits:
    """Waits of a stage's groups. groups: all. held: groups that waited until they connect; held_s: seconds, by the
    replica they waited for. unvalidated: groups that did not wait, because another stage did. widened, widened_s:
    groups whose window was widened, and by how many seconds."""

    groups: int = 0
    held: int = 0
    held_s: dict[int, float] = field(default_factory=dict)
    unvalidated: int = 0
    widened: int = 0
    widened_s: float = 0.0

    @property
    def waited_s(self) -> float:
        return sum(self.held_s.values()) + self.widened_s

    def add(self, group: RoundGroup) -> bool:
        """Count a group; return whether it is worth reporting: windows alone are not."""
        self.groups += 1
        if group.awaited is not None:
            self.held += 1
            self.held_s[group.awaited] = self.held_s.get(group.awaited, 0.0) + group.held_s
        self.unvalidated += group.cause == "not validated"
        self.widened += group.widened_s > 0
        self.widened_s += group.widened_s
        return group.awaited is not None or group.cause == "not validated"

    def in_words(self, stage: int, history: int) -> str | None:
        """Return one sentence, or None if there is nothing to report. history: as in GroupRounds."""
        reasons = []
        if self.held:
            among = "this group" if history == 1 else f"the last {history} groups"
            without = "it" if len(self.held_s) == 1 else "them"
            reasons.append(
                f"{self.held} waited {_seconds(sum(self.held_s.values()))} in all for {self._awaited()}: without "
                f"{without} {among} would not connect all replicas"
            )
        if self.unvalidated:
            reasons.append(f"{self.unvalidated} did not wait until groups connect, for another stage did")
        if self.widened:
            reasons.append(f"{self.widened} waited {_seconds(self.widened_s)} in all for replicas that were late")
        return f"stage {stage}, of {self.groups} groups: {'; '.join(reasons)}" if reasons else None

    def _awaited(self) -> str:
        longest = sorted(self.held_s, key=lambda replica: (-self.held_s[replica], replica))
        if len(longest) == 1:
            return f"replica {longest[0]}"
        named = [f"{replica} ({_seconds(self.held_s[replica])})" for replica in longest[:MAX_NAMED_REPLICAS]]
        others = len(longest) - len(named)
        return f"replicas {', '.join(named)}" + (f" and {others} more" if others else "")


def _seconds(spent: float) -> str:
    return f"{spent:.3f} s" if spent < 0.1 else f"{spent:.1f} s"
