"""The loop that finds the threshold of cache-aware threshold-v, slow and plain: the exchange engine's is held to it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.errors import BadInput

BAND = 0.1  # no change while the count is within 10 % of the target
SMALLEST_SHARE = 2.0**-9
LARGEST_SHARE = 1.0
LOST_FACTOR = 4.0  # off by more than this
LOST_UPDATES = 2  # so many times in a row: the gradients have another scale now


class ThresholdController:
    """Drives a threshold toward `target` chosen blocks a round. Pure: the same counts give the same thresholds.

    Too many chosen: the threshold rises by a share of itself (threshold += share * threshold); too few: it is lowered
    (threshold /= 1 + share). The share doubles from the third round in one direction on and is quartered when the
    direction turns: a turn costs less than it overshot, so the loop comes to rest, and yet it follows gradients that
    shrink or grow by orders of magnitude.
    Gradients differ in scale from tensor to tensor, so nothing here has a unit but the threshold itself.

    target: blocks to send, k / 16; may be changed at any time (a new sparsity).
    Source: StellaTrain (SIGCOMM '24), section 3.2; the start from a sample and the changing share are ours.
    """

    def __init__(self, target: int) -> None:
        self.threshold = 0.0
        self._target = _checked_target(target)
        self._share = SMALLEST_SHARE
        self._direction = 0
        self._held_for = 0  # updates in this direction
        self._off_for = LOST_UPDATES  # nothing is known yet

    @property
    def target(self) -> int:
        return self._target

    @target.setter
    def target(self, target: int) -> None:
        self._target = _checked_target(target)

    @property
    def needs_sample(self) -> bool:
        """True where `start` with scores of the coming round would help: at first, and after counts far off."""
        return self._off_for >= LOST_UPDATES

    def start(self, scores: Sequence[float], blocks: int) -> float:
        """Set the threshold that would choose `target` of `blocks` blocks, judged by the scores of a sample.

        scores: of blocks drawn evenly, as from `atoll.kernels.compress.sample_scores`; -1 for those not finite.
        With no score above 0 the threshold becomes 0, which chooses every block that is not all zeros.
        """
        ranked = sorted((score for score in map(float, scores) if 0 < score < math.inf), reverse=True)
        chosen = self._target * len(scores) / max(blocks, 1)
        self.threshold = _interpolated(ranked, chosen)
        self._share, self._direction, self._held_for, self._off_for = SMALLEST_SHARE, 0, 0, 0
        return self.threshold

    def update(self, found: int) -> float:
        """Take in how many blocks exceeded the threshold (`Selection.found`) and return the next threshold."""
        self._note_if_lost(found)
        direction = self._wanted_direction(found)
        if direction == self._direction:
            self._held_for += 1
            if direction != 0 and self._held_for > 2:
                self._share = min(self._share * 2, LARGEST_SHARE)
        else:
            self._held_for = 1
            if direction == 0 or self._direction != 0:
                self._share = max(self._share / 4, SMALLEST_SHARE)
        if direction > 0:
            self.threshold += self._share * self.threshold
        elif direction < 0:
            self.threshold /= 1 + self._share
        self._direction = direction
        return self.threshold

    def _wanted_direction(self, found: int) -> int:
        if found > self._target * (1 + BAND):
            return 1
        # At 0 everything that is not zero is chosen already: nothing is left to lower.
        return -1 if found < self._target * (1 - BAND) and self.threshold > 0 else 0

    def _note_if_lost(self, found: int) -> None:
        too_many = found > self._target * LOST_FACTOR or (self.threshold == 0 and self._wanted_direction(found) > 0)
        too_few = found * LOST_FACTOR < self._target and self.threshold > 0
        self._off_for = self._off_for + 1 if too_many or too_few else 0


def _checked_target(target: int) -> int:
    if target < 1:
        raise BadInput(f"target = {target} blocks a round sends nothing; pass 1 or more")
    return target


def _interpolated(ranked: Sequence[float], chosen: float) -> float:
    """A value that `chosen` of the descending `ranked` exceed, as near as they tell."""
    if not ranked or chosen >= len(ranked):
        return 0.0
    if chosen < 1:  # beyond what the sample can see: its largest is the best guess
        return ranked[0]
    above = int(chosen)
    share = chosen - above
    return ranked[above - 1] * (1 - share) + ranked[above] * share
