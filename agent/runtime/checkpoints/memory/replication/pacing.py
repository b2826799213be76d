"""Limits the bytes of a copy that leave within the idle span under way to what `plan_chunks` puts into it. Pure.

The plan is made again in every span, for what is left of copy and span; so a span that begins late, a copy that is
ready late and a rate that has changed are in it. What does not fit into this span comes in the next ones."""

from __future__ import annotations

from typing import Final

from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import IdleSpans
from atoll.agent.runtime.checkpoints.memory.replication.path_model import CHUNKS_PER_WINDOW, PathModel
from atoll.planning.chunks import ChunksInput, plan_chunks

USABLE_SHARE: Final = 0.9
"""Share of a span in which copies leave: mu of Gemini's Algorithm 6.2."""
_OVERDUE_FACTOR: Final = 2.0
"""Times its expected length after which a span is not one of a step: training does something else."""
_OVERDUE_S: Final = 0.05
"""Seconds by which it must also be longer."""
_NO_LIMIT: Final = 1 << 62
"""Bytes: more than any copy has."""


def overdue(spans: IdleSpans, now_s: float) -> bool:
    """Return whether links are idle for longer than ever within a step."""
    expected_s = spans.expected_s()
    if spans.idle_since_s is None or expected_s is None:
        return False
    return now_s - spans.idle_since_s > _OVERDUE_FACTOR * expected_s + _OVERDUE_S


def allowance(spans: IdleSpans, path: PathModel, left_bytes: int, now_s: float) -> int:
    """Bytes, of the `left_bytes` of a copy, for which what is left of this span suffices; 0 while links are busy.

    Without limit as long as nothing is known of spans or link. One chunk in a step's longest span always, so that a
    copy gets on where training leaves no time at all."""
    if spans.idle_since_s is None:
        return 0
    expected_s = spans.expected_s()
    if expected_s is None or path.bandwidth is None or overdue(spans, now_s):
        return _NO_LIMIT
    usable_s = max(USABLE_SHARE * expected_s - (now_s - spans.idle_since_s), 0.0)
    chunk_bytes = path.chunk_bytes
    could_bytes = int(usable_s * path.bandwidth) + chunk_bytes
    plan = plan_chunks(
        ChunksInput(
            idle_spans=(usable_s, 0.0),  # this one; what is put into the last, whatever its length, has to wait
            checkpoint_bytes=min(left_bytes, could_bytes),
            replicas=2,  # holders come one after the other
            buffers=CHUNKS_PER_WINDOW,
            buffer_bytes=CHUNKS_PER_WINDOW * chunk_bytes,
            bandwidth=path.bandwidth,
            alpha=path.alpha_s,
            mu=1.0,  # of the whole span, and taken off above
        )
    )
    fits = sum(chunk.bytes for chunk in plan.chunks if chunk.span == 0)
    return max(fits, chunk_bytes) if spans.is_longest() else fits
