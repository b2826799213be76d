"""Messages that an engine takes in from others, those it refuses, and what it says is missing."""

from __future__ import annotations

import select
from typing import Any

import pytest
import torch
from exchange_job import ALL, Job
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadInput, DeadlineExceeded, PeerLost
from atoll.kernels.exchange_engine import GradientEngine, Outgoing


def sent(job: Job, rank: int) -> list[Outgoing]:
    job.engines[rank].idle(5)
    return job.engines[rank].take_outgoing()


def readable(engine: GradientEngine) -> bool:
    return bool(select.select([engine], [], [], 0)[0])


def outcome(engine: GradientEngine) -> str:
    try:
        engine.fetch([0], 0, 5)
    except PeerLost as lost:
        return str(lost).partition(":")[0]
    return "well"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor": 2}, "unknown tensor"),
        ({"tensor": 2**63}, "unknown tensor"),
        ({"origin": 0}, "from nobody"),
        ({"origin": 2}, "from nobody"),
        ({"origin": 3}, "from nobody"),
        ({"origin": 2**64 - 1}, "from nobody"),
        ({"kind": 1, "origin": 0}, "from nobody"),
        ({"kind": 1, "origin": 2}, "from nobody"),
        ({"sync_round": 4}, "old round"),
        ({"sync_round": 0}, "old round"),
        ({"sync_round": 22}, "round too far ahead"),
        ({"sync_round": 2**64 - 1}, "round too far ahead"),
        ({"count": 11}, "too large"),
        ({"count": 2**64 - 1}, "too large"),
        ({"payload": bytes(10 * (16 * 2 + 5) + 1), "count": 10}, "too large"),
    ],
)
def test_what_cannot_be_meant_for_this_rank_is_refused(change: dict[str, Any], reason: str) -> None:
    """Rank 0 has applied rounds up to 4, and compressed round 5; rank 1 is its mate."""
    with Job([[0, 1], [2]], [160, 160], first_round=5) as job:
        job.compress(5, 2)
        message = sent(job, 1)[0]
        frame = {
            "kind": 0,
            "origin": 1,
            **{k: v for k, v in message._asdict().items() if k not in ("kind", "order", "to")},
        }
        assert job.engines[0].deliver(**(frame | change)) == reason
        assert job.engines[0].deliver(**frame) is None
        assert job.engines[0].deliver(**frame) == "twice"


def test_messages_are_taken_up_to_16_rounds_ahead_and_wait_for_their_turn() -> None:
    with Job([[0], [1]], [160]) as job:
        for sync_round in range(17):
            job.engines[1].compress(sync_round, 0, torch.ones(160), 0.5, 3)
            job.engines[1].apply(sync_round, sync_round + 1, [(0.1, 0.0, 0.0, 0.0, 0.0)])
        messages = sent(job, 1)
        refusals = [job.deliver(1, message, 0) for message in reversed(messages)]
        assert refusals == ["round too far ahead"] + [None] * 16  # nothing compressed yet: the newest is -1
        for sync_round in range(17):
            job.engines[0].compress(sync_round, 0, torch.ones(160), 0.5, 3)
            job.engines[0].apply(sync_round, sync_round + 1, [(0.1, 0.0, 0.0, 0.0, 0.0)])
        assert job.deliver(1, messages[16], 0) is None
        for message in sent(job, 0):
            assert job.deliver(0, message, 1) is None
        job.fetch(16)
        job.assert_equal_shared_params()
        assert job.deliver(1, messages[16], 0) == "old round"


@pytest.mark.parametrize("kind", [0, 1])
def test_damaged_bytes_lose_the_peer_and_say_whose_what_and_how(kind: int) -> None:
    islands = [[0, 1]] if kind == 0 else [[0], [1]]
    with Job(islands, [160, 160]) as job:
        job.compress(0, 3)
        message = next(m for m in sent(job, 1) if m.tensor == 1)
        broken = message._replace(payload=message.payload[:-1])
        before = job.shared_params(0)[1].clone()
        assert job.deliver(1, broken, 0) is None
        who, what = ("rank 1", "part") if kind == 0 else ("island 1", "sum")
        with pytest.raises(PeerLost, match=f"{who} sent a damaged {what} of tensor 1 for sync round 0: the payload of"):
            job.engines[0].fetch([0, 1], 0, 5)
        assert torch.equal(job.shared_params(0)[1], before)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 10), st.sampled_from(["threshold", "random"]))
def test_no_bytes_do_more_than_lose_the_peer(payload: bytes, count: int, selection: Any) -> None:
    with Job([[0], [1]], [157], selection=selection) as job:
        job.compress(0, 3)
        job.apply(0)
        refused = job.engines[0].deliver(1, 1, 0, 0, count, payload)
        assert refused in (None, "too large")
        if refused is None:
            damaged = "island 1 sent a damaged sum of tensor 0 for sync round 0"
            assert outcome(job.engines[0]) in ("well", damaged)
        assert job.shared_params(0)[0].isfinite().all()


def test_ranks_that_send_different_numbers_of_random_blocks_are_told() -> None:
    with Job([[0, 1]], [160], selection="random") as job:
        job.engines[0].compress(0, 0, torch.ones(160), 0.5, 3)
        job.engines[1].compress(0, 0, torch.ones(160), 0.5, 4)
        job.deliver(1, sent(job, 1)[0], 0)
        with pytest.raises(
            PeerLost, match="rank 1 sends 4 random blocks of tensor 0 in sync round 0, this rank 3: their plans differ"
        ):
            job.engines[0].fetch([0], 0, 5)


def test_the_deadline_names_what_is_missing() -> None:
    with Job([[0, 1], [2], [3]], [160]) as job:
        engine = job.engines[0]
        with pytest.raises(
            DeadlineExceeded, match=r"0.1 s tensor 0 waits for sync round 0: part of rank 0, this one, is"
        ):
            engine.fetch([0], 0, 0.1)
        job.compress(0, 3)
        parts = {rank: sent(job, rank) for rank in range(1, 4)}
        assert job.deliver(2, parts[2][0], 0) is None
        with pytest.raises(
            DeadlineExceeded,
            match="after 0.1 s tensor 0 waits for sync round 0: part of rank 1 is missing, sum of island 2 is missing$",
        ):
            engine.fetch([0], 0, 0.1)
        assert job.deliver(1, parts[1][0], 0) is None
        assert job.deliver(3, parts[3][0], 0) is None
        engine.idle(5)
        with pytest.raises(DeadlineExceeded, match="tensor 0 waits for sync round 0: no update was ordered for it$"):
            engine.fetch([0], 0, 0)
        engine.apply(0, 1, [(0.1, 0.0, 0.0, 0.0, 0.0)])
        engine.fetch([0], 0, 5)


def test_the_event_is_readable_while_something_waits_to_be_sent() -> None:
    with Job([[0], [1]], [160, 160, 160]) as job:
        engine = job.engines[0]
        assert not readable(engine)
        job.compress(0, 3)
        engine.idle(5)
        assert readable(engine)
        assert [message.tensor for message in engine.take_outgoing(2)] == [0, 1]
        assert readable(engine)
        assert len(engine.take_outgoing(2)) == 1
        assert not readable(engine)
        assert engine.take_outgoing() == []
        engine.fail("nobody is there")
        assert readable(engine)
        assert engine.take_outgoing() == []
        assert not readable(engine)  # it would keep its poller busy for nothing


def test_payloads_may_be_any_bytes_and_are_copied() -> None:
    with Job([[0], [1]], [160]) as job:
        job.compress(0, ALL)
        job.apply(0)
        mine, theirs = sent(job, 0)[0], sent(job, 1)[0]
        assert job.deliver(0, mine, 1) is None
        job.engines[0].quiesce(5)
        memory = bytearray(theirs.payload)
        refused = job.engines[0].deliver(1, 1, 0, 0, theirs.count, memoryview(memory))
        memory[:] = bytes(len(memory))
        job.engines[0].resume()
        assert refused is None
        job.fetch(0)
        job.assert_equal_shared_params()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"islands": [[0], [2]]}, "islands lacks rank 1 or has one twice"),
        ({"islands": [[0], [0, 1]]}, "islands lacks rank 1 or has one twice"),
        ({"islands": [[0], []]}, "islands has one without a rank"),
        ({"rank": 5}, "rank = 5 is in no island"),
        ({"threads": 0}, "threads = 0 is not in 1..256"),
        ({"values": "int3"}, "values = 'int3' is not known"),
        ({"selection": "best"}, "selection = 'best' is not known"),
        ({"digest_every": -1}, "digest_every = -1 is negative"),
        ({"first_round": -1}, "first_round = -1 is negative"),
        ({"islands": [[k] for k in range(64)]}, "islands has 64 islands, more than 63"),
    ],
)
def test_settings_that_cannot_work_are_named(how: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        GradientEngine(**({"rank": 0, "islands": [[0], [1]]} | how))


def test_arguments_that_cannot_work_are_named_and_change_nothing() -> None:
    x = [torch.zeros(100) for _ in range(4)]
    with Job([[0], [1]], [100]) as job:
        engine = job.engines[0]

        def refused(what: str, call: Any, *args: Any, **how: Any) -> None:
            with pytest.raises(BadInput, match=what):
                call(*args, **how)

        add = engine.add_tensor
        refused("residual has 99 entries, not 100", add, order=0, rule="sgd", shared_param=x[0], residual=x[1][:99])
        refused(
            "rule 'adam' needs its moments", add, order=0, rule="adam", shared_param=x[0], residual=x[1], first=x[2]
        )
        refused("rule = 'lamb' is not known", add, order=0, rule="lamb", shared_param=x[0], residual=x[1])
        refused("shared_param and residual share memory", add, order=0, rule="sgd", shared_param=x[0], residual=x[0])
        refused(
            "residual is None, but error feedback is on", add, order=0, rule="sgd", shared_param=x[0], residual=None
        )
        refused(
            "last_step is float32, not int32",
            add,
            order=0,
            rule="sgd",
            shared_param=x[0],
            residual=x[1],
            last_step=x[2],
        )
        refused("order = -1 is negative", add, order=-1, rule="sgd", shared_param=x[0], residual=x[1])
        assert add(order=1, rule="sgd", shared_param=x[0], residual=x[1]) == 1
        refused("tensor = 2 is not one of the 2", engine.compress, 0, 2, x[2], 1.0, 1)
        refused("sync_round = 1 of tensor 0 cannot be compressed after round -1", engine.compress, 1, 0, x[2], 1.0, 1)
        refused("gradient has 99 entries, not 100", engine.compress, 0, 0, x[2][:99], 1.0, 1)
        refused("gradient is float64", engine.compress, 0, 0, x[2].double(), 1.0, 1)
        refused("k_blocks = 0 sends nothing", engine.compress, 0, 0, x[2], 1.0, 0)
        refused("weight = nan is not finite", engine.compress, 0, 0, x[2], torch.nan, 1)
        rates = (0.1, 0.0, 0.0, 0.0, 0.0)
        refused("sync_round = 1 cannot be applied or accumulated after round -1", engine.apply, 1, 1, [rates])
        refused("sync_round = 2 cannot be applied or accumulated after round -1", engine.accumulate, 2)
        refused("update = 0 is not the number of an update", engine.apply, 0, 0, [rates])
        refused("groups has 0 entries, but tensor 0 is of group 0", engine.apply, 0, 1, [])
        refused("lr = nan is not a finite number", engine.apply, 0, 1, [(torch.nan, 0.0, 0.0, 0.0, 0.0)])
        refused("momentum of tensor 1 needs `first`", engine.apply, 0, 1, [(0.1, 0.0, 0.9, 0.0, 0.0)])
        refused("clip_norm = -1.0", engine.apply, 0, 1, [rates], clip_norm=-1.0)
        refused("tensor 1 has no live buffer to fetch into", engine.fetch, [0, 1], 0, 1)
        refused("tensor 0 has a live buffer", engine.changes, [0], 0, 1)
        refused("tensor = 9 is not one of", engine.fetch, [9], 0, 1)
        refused("deadline_s = nan is not a time", engine.fetch, [0], 0, torch.nan)
        refused("kind = 2 is none of 0", engine.deliver, 2, 1, 0, 0, 0, b"")
        refused("payload is None", engine.deliver, 1, 1, 0, 0, 0, None)
        refused("incompatible function arguments", engine.deliver, 1, -1, 0, 0, 0, b"")
        assert engine.versions() == [-1, -1]
        assert engine.take_stats().tasks == 0
        engine.compress(0, 0, x[2], 1.0, 1)
        refused("add_tensor came after the first round", add, order=2, rule="sgd", shared_param=x[2], residual=x[3])
