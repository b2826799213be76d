"""The order in which frames leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.agent.runtime.transport.frames import Kind
from atoll.agent.runtime.transport.sendqueue import EncodedFrame, SendQueue


def encoded(kind: Kind = Kind.PART, step: int = 0, order: int = 0, payload: bytes = b"") -> EncodedFrame:
    return EncodedFrame(kind, step, order, b"h" * 50, payload)


def drain(queue: SendQueue) -> list[EncodedFrame]:
    out: list[EncodedFrame] = []
    while queue:
        out += queue.pop(1, 0)
    return out


def test_urgent_layers_overtake_and_goodbye_says_that_nothing_follows() -> None:
    queue = SendQueue()
    came = [
        encoded(Kind.GOODBYE),
        encoded(step=2, order=0),
        encoded(step=1, order=5),
        encoded(step=1, order=1),
        encoded(Kind.DIGEST, step=1, order=2**32 - 1),
        encoded(Kind.CONTROL, step=9, order=7),
    ]
    for one in came:
        queue.push(one, now_s=0)
    assert drain(queue) == [came[5], came[3], came[2], came[4], came[1], came[0]]


def test_small_ones_leave_together_and_a_large_one_alone() -> None:
    queue = SendQueue()
    small, large = (
        [encoded(order=order, payload=b"x" * 50) for order in range(3)],
        encoded(order=3, payload=b"x" * 5000),
    )
    for one in (large, *small):
        queue.push(one, now_s=0)
    assert queue.pop(2, 1000) == small[:2]
    assert queue.pop(64, 1000) == small[2:]
    assert queue.pop(64, 1000) == [large]
    assert (queue.pop(64, 1000), queue.bytes) == ([], 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_bytes_and_the_oldest_are_known_at_any_time(keys: list[tuple[int, int]], taken: int) -> None:
    queue = SendQueue()
    for at, (step, order) in enumerate(keys):
        queue.push(encoded(step=step, order=order, payload=b"x" * at), now_s=at)
    out = [one for _ in range(taken) for one in queue.pop(1, 0)]
    left = set(range(len(keys))) - {len(one.payload) for one in out}
    assert queue.bytes == sum(50 + at for at in left)
    assert queue.waited_s(100) == (100 - min(left) if left else 0)
