from __future__ import annotations

from dataclasses import replace

import pytest
from made import run

from atoll.controller.jobs.agents.progress import ProgressBoard
from atoll.controller.jobs.model.script_facts import ScriptFacts
from atoll.v1.agents_pb2 import Prepared, WorkerTelemetry
from atoll.v1.common_pb2 import LinkSample, StepSample, WorkerId


def test_an_epochs_short_last_batch_is_no_measure_of_speed_nor_of_the_total_batch() -> None:
    """1. Twenty whole batches of 64. 2. The epoch's last has 4 samples and costs almost as much. 3. The planner is told
    64 and the time per sample of whole batches; in the demo it once planned for a total of 96 instead of 256."""
    board = ProgressBoard()
    progress = board.begin(run("a", job="vit-1234"))
    worker = WorkerId(job="vit-1234", run=1, rank=0)
    whole = [StepSample(step=s, plan=1, local_batch=32, total_batch=64, compute_s=0.32) for s in range(20)]
    short = StepSample(step=20, plan=1, local_batch=2, total_batch=4, compute_s=0.3)
    board.observe(WorkerTelemetry(id=worker, steps=[*whole, short]))
    assert progress.total_batch == 64
    rank = progress.profile(0.0, renew=True)[0].ranks[0]
    assert (rank.local_batch, round(rank.compute_s, 6)) == (32, 0.32)
    assert progress.to_wire(0.0).step == 21  # steps completed


def test_what_is_left_follows_from_epochs_samples_and_the_newest_steps() -> None:
    """1. 3 epochs of 640 samples; in the second, 128 are trained on: 1,152 are left, at 640 a second. 2. The script of
    another rank is nobody's word. 3. A stream does not say how long an epoch is."""
    for samples, left_s, trained_share in ((640, 1.8, 0.4), (0, 0.0, 0.0)):
        board = ProgressBoard(clock=lambda: 10.0)
        progress = board.begin(run("a", "b", job="vit-1234"))
        sample = StepSample(step=11, epoch=1, consumed=128, total_batch=64, step_s=0.1)
        for rank, epochs in ((0, 3), (1, 9)):
            prepared = Prepared(samples=samples, batch_size=64, epochs=epochs)
            worker = WorkerId(job="vit-1234", run=1, rank=rank)
            board.observe(WorkerTelemetry(id=worker, prepared=prepared, steps=[sample] if rank == 0 else ()))
        told = progress.to_wire(11.0)
        assert (told.left_s, told.trained_share) == (pytest.approx(left_s), pytest.approx(trained_share))


def test_rank_0_reports_what_its_script_allows() -> None:
    """A message without the facts, as of a later epoch count alone, does not delete them."""
    board = ProgressBoard()
    progress = board.begin(run("a", "b", job="vit-1234"))
    facts = Prepared(entries=90, tensors=3, gradient_density=0.25, refused={"zen": "no"}, strategy="dense")
    for rank, prepared in ((0, facts), (1, Prepared(entries=90, tensors=4)), (0, Prepared(entries=90, epochs=2))):
        board.observe(WorkerTelemetry(id=WorkerId(job="vit-1234", run=1, rank=rank), prepared=prepared))
    assert progress.script == ScriptFacts(
        entries=90, tensors=3, gradient_density=0.25, refused={"zen": "no"}, strategy="dense"
    )


def test_metrics_of_a_strategy_are_summed_up_as_it_declares_them() -> None:
    """Seconds as a share of the step, shares as a mean over the ranks, sparsity as rank 0's newest."""
    board = ProgressBoard(clock=lambda: 10.0)
    progress = board.begin(run("a", "b", job="vit-1234"))
    for rank, stall_s, fresh in ((0, 0.1, 1.0), (1, 0.3, 0.5)):
        numbers = {"stall_s": stall_s, "fresh_share": fresh, "sparsity": 0.9 + rank / 100}
        sample = StepSample(step=4, total_batch=8, step_s=1.0, strategy_metrics=numbers)
        board.observe(WorkerTelemetry(id=WorkerId(job="vit-1234", run=1, rank=rank), steps=[sample]))
    observed = progress.to_wire(11.0)
    assert dict(observed.strategy_metrics) == pytest.approx({"sparsity": 0.9, "stall_share": 0.2, "fresh_share": 0.75})
    later = progress.to_wire(20.0).strategy_metrics
    assert (later["stall_share"], later["fresh_share"]) == (0.0, 0.0)  # nothing was heard lately


def test_of_each_link_the_newest_is_kept_and_not_more_than_64() -> None:
    board = ProgressBoard()
    progress = board.begin(run("a", job="vit-1234"))
    worker = WorkerId(job="vit-1234", run=1, rank=0)
    board.observe(WorkerTelemetry(id=worker, links=[LinkSample(peer=peer, sent_bytes=1) for peer in range(64)]))
    board.observe(WorkerTelemetry(id=worker, links=[LinkSample(peer=3, sent_bytes=9), LinkSample(peer=64)]))
    links = progress.ranks[0].links
    assert (len(links), links[3].sent_bytes, 64 in links) == (64, 9, False)


def test_a_link_is_as_wide_as_all_that_it_carried_while_the_exchange_was_busy() -> None:
    """1. A link of 10 Mbit/s carries copies beside the exchange, from the fifth second on a third of it. 2. It is
    estimated as before: what copies took would be planned away, and left to copies."""
    now_s = 1000.0
    board = ProgressBoard(lambda: now_s)
    record = run("a", "b", job="vit-1234")
    members = tuple(replace(member, island=name) for member, name in zip(record.members, ("one", "two"), strict=True))
    progress = board.begin(replace(record, members=members))
    worker = WorkerId(job="vit-1234", run=1, rank=0)
    sent, copied = 0, 0
    for second in range(30):
        now_s = 1000.0 + second
        board.observe(
            WorkerTelemetry(
                id=worker, links=[LinkSample(peer=1, sent_bytes=sent, copied_bytes=copied, busy_s=0.7 * second)]
            )
        )
        beside = 0.33 if second >= 5 else 0.0
        sent, copied = sent + int((0.7 - 0.7 * beside) * 1_250_000), copied + int(0.7 * beside * 1_250_000)
    estimate = progress.estimators.profile().links["one"].bandwidth_bps
    assert estimate == pytest.approx(10e6, rel=0.02)


def test_the_next_step_is_the_first_while_none_was_reported() -> None:
    board = ProgressBoard()
    progress = board.begin(run("a", job="vit-1234"))
    assert progress.next_step == 0
    board.observe(WorkerTelemetry(id=WorkerId(job="vit-1234", run=1, rank=0), steps=[StepSample(step=0)]))
    assert progress.next_step == 1
