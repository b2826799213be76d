"""Links and steps in simulated time: what they do is known to the byte, and no clock is involved."""

from __future__ import annotations

from collections import deque

from atoll.agent.runtime.checkpoints.memory.replication.idle_spans import IdleSpans
from atoll.agent.runtime.checkpoints.memory.replication.path_model import PathModel


class Link:
    """Carries `bandwidth` bytes a second; a chunk is answered `rtt_s` after its last byte left."""

    def __init__(self, bandwidth: float, rtt_s: float) -> None:
        self.bandwidth, self.rtt_s = bandwidth, rtt_s
        self.now_s = 0.0

    def copy(self, path: PathModel, total: int) -> float:
        """Seconds that a file of so many bytes takes, sent as the path says."""
        begun_s, free_s, sent, reached = self.now_s, self.now_s, 0, 0
        answers: deque[tuple[float, int]] = deque()
        path.restart(0)
        while reached < total:
            while sent < total and sent - reached + path.chunk_bytes <= path.window_bytes:
                length = min(path.chunk_bytes, total - sent)
                sent += length
                free_s = max(free_s, self.now_s) + length / self.bandwidth
                answers.append((free_s + self.rtt_s, sent))
                path.sent(sent, self.now_s)
            self.now_s, reached = answers.popleft()
            path.reached(reached, self.now_s)
        self.now_s += 0.1
        return self.now_s - 0.1 - begun_s


def trained(spans: IdleSpans, steps: int, *lengths_s: float, begin_s: float = 0.0, exchange_s: float = 0.01) -> float:
    """Steps with these idle spans; the boundary lies in the first. Returns when the last exchange ended."""
    now_s = begin_s
    spans.idle(now_s)
    for _ in range(steps):
        for length_s in lengths_s:
            now_s += length_s
            spans.busy(now_s)
            now_s += exchange_s
            spans.idle(now_s)
        spans.boundary()
    return now_s
