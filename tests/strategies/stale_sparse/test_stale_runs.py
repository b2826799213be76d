"""Whole runs of strategy stale-sparse: real worker processes, their own sockets between them. Each test is a story."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from held_ports import free_port
from sparse_runs import (
    Tensors,
    check_alike,
    check_every_sample_once,
    check_nothing_was_lost,
    equal,
    kept,
    sent_in_a_round,
    sparse,
    together,
    trained,
)
from zmq_agent import Start, torchrun_like

from atoll.agent.runtime.checkpoints.disk import files, listing
from atoll.agent.runtime.transport.limits import Limits
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES, UpdateTraffic, update_density
from atoll.strategies.stale_sparse.worker import pace_of

pytestmark = pytest.mark.timeout(300)

EXCHANGES = pytest.mark.parametrize("exchange", ["updates", "gradients"])


def test_what_scripts_do_works_by_both_exchanges(start: Start, tmp_path: Path) -> None:
    """Three ranks on two islands, started by hand: every setting; batch norm and evaluations; bfloat16 parameters
    and a resume; a weight without a forward pass of its own. The script says each; all ranks end with the same bits."""
    ports, islands = ",".join(str(free_port()) for _ in range(16)), ("west", "west", "east")
    codes = torchrun_like("stale_cases.py", ports, str(tmp_path), world_size=3, islands=islands, start=start)
    assert codes == [0] * 3


def test_places_and_keys_of_the_launch_are_used_and_every_step_is_told(start: Start, tmp_path: Path) -> None:
    """Two islands: the first's ranks share memory, the second's are on two nodes. A plan with another rate and other
    shares comes while they train: it holds from the same step on all ranks, and each step's figures are told."""
    with sparse(tmp_path, 4, start=start, sparsity=0.95, digest_every=4, exchange="gradients") as agent:
        agent.place(["a", "a", "b", "c"], ["west", "west", "east", "east"])
        agent.shares, agent.params = (1.0, 1.0, 1.0, 1.0), {"sparsity": 0.9}
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "6", "--sleep-s", "0.05")
        agent.wait_for_step(5)
        agent.send_plan(2, 0, (3.0, 1.0, 1.0, 1.0), sparsity=0.8)
        assert agent.exit_codes() == [0] * 4, agent.said()
    changes = set()
    for rank in range(4):
        samples = agent.steps[rank]
        assert [sample.step for sample in samples] == list(range(54))
        assert {(sample.plan, sample.strategy_metrics["sparsity"]) for sample in samples} == {(1, 0.9), (2, 0.8)}
        changes.add(next(sample.step for sample in samples if sample.plan == 2))
        assert {sample.local_batch for sample in samples if sample.total_batch == 12} == {3, 6 if rank == 0 else 2}
        stalls = [(sample.strategy_metrics["stall_s"], sample.step_s) for sample in samples]
        assert [one for one in stalls if not 0 <= one[0] <= one[1]] == []
        fresh = [sample.strategy_metrics["fresh_share"] for sample in samples]
        assert [one for one in fresh if not 0 <= one <= 1] == []
        spent_s = {name: sum(sample.strategy_metrics[name] for sample in samples) for name in ("select_s", "apply_s")}
        assert min(spent_s.values()) > 0, spent_s
        told = sum(link.sent_bytes for link in agent.links[rank].values())
        sent = sum(sample.strategy_metrics["sent_bytes"] for sample in samples if sample.step <= 44)
        assert told / 4 < sent <= told  # on the wire, with what frames this small need beside
        assert [link for link in agent.links[rank].values() if link.dropped or not link.received_bytes] == []
    assert len(changes) == 1
    assert {rank: set(links) for rank, links in agent.links.items()} == {0: {1, 2}, 1: {0}, 2: {0, 3}, 3: {2}}
    ended = [kept(tmp_path, 1, rank, "end") for rank in range(4)]
    shared_params, live = check_alike(ended, "shared_params"), check_alike(ended, "live")
    assert equal(live, shared_params)
    assert any(tensor.any() for state in ended for tensor in state["residuals"].values())


@EXCHANGES
def test_workers_send_the_bytes_that_the_planner_counts(start: Start, tmp_path: Path, exchange: str) -> None:
    """1. Three islands train 172,000 entries, a sparsity in each epoch, as plans say. 2. What leaves on sockets is what
    `tta` and the simulator count. 3. That holds at sparsity 0 too, where each worker sends its whole update: three
    times the bytes of a sparsity just above 0. (Gradients that a threshold follows may be fewer than asked for.)"""
    sparsities = (0.9, 0.01, 0.0)
    width, nodes = 4096, ["a", "b", "c"]
    entries = 9 * width + 33 * width + 33 + 34
    with sparse(tmp_path, 3, start=start, sparsity=0.9, values="float16", exchange=exchange) as agent:
        agent.place(nodes, nodes)
        agent.later_plans = [
            agent.plan(2 + i, 9 * (1 + i), (1.0,) * 3, {"sparsity": s}) for i, s in enumerate(sparsities[1:])
        ]
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "3", "--hidden", str(width))
        assert agent.exit_codes() == [0] * 3, agent.said()
    traffic = UpdateTraffic(entries, VALUE_BYTES["float16"], np.full(3, 1 / 3), np.ones(3))
    for sparsity, sent in zip(sparsities, sent_in_a_round(agent, 9), strict=True):
        counted = traffic.carried(update_density(sparsity, 3))[0]
        assert pace_of(sparsity, 3).sent * 3 == pytest.approx(update_density(sparsity, 3))
        if exchange == "updates" or sparsity == 0:
            assert sent == pytest.approx(counted, rel=0.2), sparsity
        else:
            assert all(a < 1.3 * b for a, b in zip(sent, counted, strict=True)), (sparsity, sent, counted)
    told = [sum(link.sent_bytes for link in agent.links[rank].values()) for rank in range(3)]
    if exchange == "updates":
        in_all = sum(9 * np.array(traffic.carried(update_density(sparsity, 3))[0]) for sparsity in sparsities)
        assert told == pytest.approx(np.asarray(in_all).tolist(), rel=0.05)


@EXCHANGES
def test_drained_and_resumed_by_fewer_nothing_is_trained_or_taken_over_twice(
    start: Start, tmp_path: Path, exchange: str
) -> None:
    """1. Three ranks are asked to stop and end with 85. 2. Two go on: residuals of the three are shared out among
    them, each rank's once. 3. Every sample counts exactly once, and all gradients of both runs are either in the
    weights or still residuals."""
    settings = {"sparsity": 0.9, "values": "float32", "digest_every": 3, "exchange": exchange}
    with sparse(tmp_path, 3, start=start, run=1, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--await-stop-at", "5")
        agent.send_stop_in(5, rank=0)
        assert agent.exit_codes() == [85] * 3, agent.said()
        drained = agent.checkpoint_step
        assert drained == 7  # said in step 5, done after step 6: one step late
    with sparse(tmp_path, 2, start=start, run=2, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 2, agent.said()
        assert agent.said().count(f"resumes from step {drained}\n") == 2
        assert agent.warnings == []
    first = [kept(tmp_path, 1, rank, "end") for rank in range(3)]
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(2)] for what in ("begin", "end"))
    before = together(first, "residuals")
    assert any(tensor.any() for tensor in before.values())
    torch.testing.assert_close(together(begun, "residuals"), before, rtol=1e-4, atol=1e-6)
    # Rank 1 took over its own, rank 0 its own and that of rank 2, which is no more.
    torch.testing.assert_close(begun[1]["residuals"], first[1]["residuals"], rtol=1e-4, atol=1e-6)
    assert equal(check_alike(begun, "shared_params"), check_alike(first, "shared_params"))
    check_every_sample_once(tmp_path, epochs=2)
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    gradients, residuals = together([*first, *second], "summed"), together(second, "residuals")
    check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, residuals, exchange)


@EXCHANGES
def test_the_batch_and_the_learning_rate_change_and_nothing_is_trained_twice(
    start: Start, tmp_path: Path, exchange: str
) -> None:
    """1. Three ranks go over from batches of 12 to 30 in step 5, and to a learning rate 1.5 times the script's; a plan
    for more than the dataset has is refused. 2. They are stopped; two ranks go on with batches of 40 and factor 2.
    3. Every sample counts once, and all gradients of both runs, each times its step's factor, are in the weights.
    All is sent: what is not counts as the shares say of the round that sends it, and not at its own step's rate."""
    settings = {"sparsity": 0.0, "values": "float32", "exchange": exchange}
    with sparse(tmp_path, 3, start=start, run=1, **settings) as agent:
        shares = (6.0, 4.0, 2.0)
        agent.later_plans = [
            agent.plan(2, 5, shares, total_batch=30, learning_rate_factor=1.5),
            agent.plan(3, 7, shares, total_batch=101),
        ]
        agent.start_workers("stale_train.py", str(tmp_path), "--await-stop-at", "7")
        agent.send_stop_in(7, rank=0)
        assert agent.exit_codes() == [85] * 3, agent.said()
        for rank, local in enumerate(((15, 5), (10, 3), (5, 2))):
            told = [(sample.plan, sample.total_batch, sample.local_batch) for sample in agent.steps[rank]]
            assert told[4:7] == [(1, 12, 4), (2, 30, local[0]), (2, 10, local[1])]
            assert told[7:] == [(3, 30, local[0])] * 2
        (refusal,) = agent.warnings
        assert refusal.startswith("plan 3 cannot be trained")
    with sparse(tmp_path, 2, start=start, run=2, **settings) as agent:
        agent.total_batch, agent.learning_rate_factor = 40, 2.0
        agent.start_workers("stale_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * 2, agent.said()
        assert [sample.total_batch for sample in agent.steps[1]] == [40, 40, 40, 20]
    check_every_sample_once(tmp_path, epochs=3)
    first = [kept(tmp_path, 1, rank, "end") for rank in range(3)]
    second = [kept(tmp_path, 2, rank, "end") for rank in range(2)]
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    gradients, residuals = together([*first, *second], "summed"), together(second, "residuals")
    check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, residuals, exchange)


def test_an_update_counts_as_the_share_of_the_batch_that_it_was_made_of(start: Start, tmp_path: Path) -> None:
    """1. Rank 0 trains 47 of 50 samples, rank 1 three; their gradients are 1 and -1. 2. Everything is sent. Adam moves
    by its rate whatever the size of a gradient: both moves counted half, and the shared parameters stood still."""
    with sparse(tmp_path, 2, start=start, sparsity=0.0, staleness=0, values="float32") as agent:
        agent.shares = (94.0, 6.0)
        agent.start_workers("weighed.py", str(tmp_path))
        assert agent.exit_codes() == [0, 0], agent.said()
    for rank in range(2):
        moved = torch.load(tmp_path / f"rank-{rank}", weights_only=True)
        torch.testing.assert_close(moved, torch.full_like(moved, -0.05 * (0.94 - 0.06)), rtol=1e-5, atol=1e-6)


def test_an_overflow_on_one_rank_leaves_its_part_of_the_round_empty(start: Start, tmp_path: Path) -> None:
    """1. Each rank scales its loss with a GradScaler. 2. Gradients of rank 1 overflow twice, and its scaler makes no
    update. 3. The other waited 300 s for its part. It comes, with nothing new: all gradients but those count."""
    with sparse(tmp_path, 2, start=start, sparsity=0.5, values="float32", digest_every=1) as agent:
        agent.start_workers("left_out.py", str(tmp_path), "scaler", "before")
        assert agent.exit_codes() == [0, 0], agent.said()
        assert agent.checkpoint_step == 24
    ended = [torch.load(tmp_path / f"rank-{rank}", weights_only=True) for rank in range(2)]
    assert [one["scale"] for one in ended] == [1024.0, 256.0]
    for begun, weights, theirs, *summed in zip(
        ended[0]["begun"], ended[0]["weights"], ended[1]["weights"], ended[0]["summed"], ended[1]["summed"], strict=True
    ):
        assert torch.equal(weights, theirs)
        torch.testing.assert_close((begun - weights).double(), 0.01 * sum(summed), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "exchange", "staleness"),
    [("once", "updates", 0), ("always", "updates", 1), ("once", "gradients", 1), ("always", "dense", 0)],
)
def test_a_script_that_leaves_updates_out_on_one_rank_is_told_so_at_once(
    start: Start, tmp_path: Path, how: str, exchange: str, staleness: int
) -> None:
    """By updates rounds were no longer of the same step, and ranks waited 300 s for one in the end. By gradients their
    shared parameters grew apart until digests were compared; dense ones for ever."""
    settings = {} if exchange == "dense" else {"sparsity": 0.5, "staleness": staleness, "exchange": exchange}
    with sparse(tmp_path, 2, start=start, **settings) as agent:
        agent.spec.strategy = "dense" if exchange == "dense" else "stale-sparse"
        agent.start_workers("left_out.py", str(tmp_path), how, "after")
        codes = agent.exit_codes()  # of the 300 s for which they waited
        assert 1 in codes, agent.said()
        assert set(codes) <= {1, 75}, agent.said()
        assert re.search("(rank [01]|one rank) [0-9]+ in this run, (rank [01]|another rank) [0-9]+", agent.said())


@EXCHANGES
def test_the_last_checkpoint_is_of_the_model_that_training_ended_with(
    start: Start, tmp_path: Path, exchange: str
) -> None:
    """Also where an ordinary one is due at that very step, before residuals are flushed."""
    with sparse(tmp_path, 2, start=start, run=1, sparsity=0.9, values="float32", exchange=exchange) as agent:
        agent.spec.checkpoint.every_steps = 9
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 2, agent.said()
        newest = listing.newest(agent.directory_of(0))[:2]
    assert [found.step for found in newest] == [18, 9]
    checkpoint = files.read(newest[0].path)
    shared_params = check_alike([kept(tmp_path, 1, rank, "end") for rank in range(2)], "shared_params")
    assert equal({name: checkpoint.tensors[f"model/{name}"] for name in shared_params}, shared_params)


@EXCHANGES
def test_a_stop_at_the_end_of_an_epoch_changes_nothing(start: Start, tmp_path: Path, exchange: str) -> None:
    """1. AdamW, everything sent, no step late. 2. The same job again, stopped at the end of epoch 1: the run that goes
    on shows the last batch of the epoch before once more. 3. The weights are the same: moments went through the
    stop."""
    settings = {"sparsity": 0.0, "staleness": 0, "values": "float32", "exchange": exchange}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for out, run, await_stop_at in ((whole, 1, -1), (stopped, 1, 8), (stopped, 2, -1)):
        out.mkdir(exist_ok=True)
        with sparse(out, 2, start=start, run=run, **settings) as agent:
            flags = ("--adamw", "--epochs", "2", "--await-stop-at", str(await_stop_at))
            agent.start_workers("stale_train.py", str(out), *flags)
            if await_stop_at > 0:
                agent.send_stop_in(await_stop_at, rank=0)
            assert agent.exit_codes() == [85 if await_stop_at > 0 else 0] * 2, agent.said()
            assert agent.checkpoint_step == (await_stop_at + 1 if await_stop_at > 0 else 18)
            assert agent.warnings == []
    check_every_sample_once(stopped, epochs=2)
    expected = check_alike([kept(whole, 1, rank, "end") for rank in range(2)], "shared_params")
    actual = check_alike([kept(stopped, 2, rank, "end") for rank in range(2)], "shared_params")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_residual_of_a_lost_machine_is_missed_aloud(start: Start, tmp_path: Path) -> None:
    """Each rank has a directory of its own; that of rank 1 is gone when the next run begins. The others take over their
    own, and a notice names the loss."""
    for run in (1, 2):
        with sparse(tmp_path, 2, start=start, run=run, sparsity=0.9, values="float32") as agent:
            agent.own_directories = True
            stop_at = "4" if run == 1 else "-1"
            agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "1", "--await-stop-at", stop_at)
            if run == 1:
                agent.send_stop_in(4, rank=0)
                assert agent.exit_codes() == [85] * 2, agent.said()
                shutil.rmtree(agent.directory_of(1))
            else:
                assert agent.exit_codes() == [0] * 2, agent.said()
                (lost,) = agent.warnings
                assert lost.startswith("the residual of rank 1 of run 1 is lost")
    for rank in range(2):
        before, after = kept(tmp_path, 1, rank, "end"), kept(tmp_path, 2, rank, "begin")
        assert equal(after["shared_params"], before["shared_params"])
        expected = {name: tensor * (rank == 0) for name, tensor in before["residuals"].items()}
        torch.testing.assert_close(after["residuals"], expected, rtol=1e-4, atol=1e-7)


@EXCHANGES
def test_a_killed_rank_costs_seconds_and_only_its_own_residual(start: Start, tmp_path: Path, exchange: str) -> None:
    """1. Rank 1 is killed (SIGKILL) in step 13. 2. The others save and end with 75 within seconds. 3. Two ranks go on
    to the end. Rank 1's gradients were all zero, so it held nothing back: every gradient of the others is in the
    weights or still residuals, whichever step each of them was in when rank 1 died."""
    settings = {"sparsity": 0.9, "values": "float32", "digest_every": 2, "exchange": exchange}
    with sparse(tmp_path, 3, start=start, run=1, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--silent-rank", "1", "--raise-at", "13")
        assert agent.workers[1].wait(timeout=120) == -signal.SIGKILL, agent.said()
        assert agent.exit_codes() == [75, -signal.SIGKILL, 75], agent.said()
        assert "silent for" not in agent.said()  # that takes 10 s: its connections' end is enough
        saved = agent.checkpoint_step
        assert saved == listing.newest(agent.job_directory)[0].step
        assert saved in {13, 14, 15}  # of step 13 rank 1 sent nothing; the forward pass of step 15 needs that
    with sparse(tmp_path, 2, start=start, run=2, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 2, agent.said()
        assert agent.said().count(f"resumes from step {saved}\n") == 2
        (lost,) = agent.warnings
        assert lost.startswith("the residual of rank 1 of run 1 is lost")
    first = [kept(tmp_path, 1, rank, "end") for rank in (0, 2)]
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(2)] for what in ("begin", "end"))
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    gradients, residuals = together(first, "summed"), together(begun, "residuals")
    check_nothing_was_lost(origin, check_alike(begun, "shared_params"), gradients, residuals, exchange)
    gradients, residuals = together([*first, *second], "summed"), together(second, "residuals")
    check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, residuals, exchange)
    assert {line["step"] for line in trained(tmp_path)} == set(range(18))


@pytest.mark.parametrize(
    ("lost", "number", "when"),
    [
        (0, 0, "by the script"),
        (2, 0, "at the end"),
        (1, int(signal.SIGKILL), "at the end"),
    ],
)
def test_a_rank_lost_in_the_middle_of_a_flush_counts_once(
    start: Start, tmp_path: Path, lost: int, number: int, when: str
) -> None:
    """1. All ranks flush their residuals. One gave the first tensor, of five layers, and is lost before it has the sum:
    its link breaks, or it is killed. 2. The others have the sum. Each saves what it has on a machine of its own. 3. The
    next run goes on from rank 0's state, which has the flush or lacks it: what each rank gave counts once either way.
    A killed rank's gradients were all zero, so it takes nothing with it."""
    settings = {"sparsity": 0.9, "values": "float32", "digest_every": 2}
    arguments = ["--break-flush", f"{lost}:{number}"]
    arguments += ["--synchronize-at", "6"] if when == "by the script" else ["--epochs", "1"]
    arguments += ["--silent-rank", str(lost)] if number else []
    with sparse(tmp_path, 3, start=start, run=1, **settings) as agent:
        agent.own_directories = True
        agent.start_workers("stale_train.py", str(tmp_path), *arguments)
        codes = agent.exit_codes()
        assert codes == [-number if number and rank == lost else 75 for rank in range(3)], agent.said()
        counts = {tuple(flushes(agent.directory_of(rank))) for rank in range(3) if rank != lost or not number}
        assert counts <= {(1, 1, 0, 1, 1, 1), (0, 0, 0, 0, 0, 0)}
        assert number or len(counts) == 2
    with sparse(tmp_path, 3, start=start, run=2, **settings) as agent:
        agent.own_directories = True
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 3, agent.said()
    first = [kept(tmp_path, 1, rank, "end") for rank in range(3) if rank != lost or not number]
    begun = [kept(tmp_path, 2, rank, "begin") for rank in range(3)]
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    gradients, residuals = together(first, "summed"), together(begun, "residuals")
    check_nothing_was_lost(origin, check_alike(begun, "shared_params"), gradients, residuals, "updates")


def flushes(directory: Path) -> list[int]:
    """By layer, how many the newest checkpoint contains."""
    checkpoint = files.read(listing.newest(directory)[0].path)
    (name,) = [name for name in checkpoint.tensors if name.endswith("flushes")]
    counts: list[int] = checkpoint.tensors[name].tolist()
    return counts


def test_a_paused_rank_is_lost_within_the_limit_of_silence(start: Start, tmp_path: Path) -> None:
    """Rank 1 is stopped (SIGSTOP) in step 6: its kernel still answers, it does not. Rank 0 saves and ends with 75."""
    pause = ("--raise-at", "6", "--signal", str(int(signal.SIGSTOP)))
    with sparse(tmp_path, 2, start=start, sparsity=0.9) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), *pause)
        assert agent.workers[0].wait(timeout=Limits().silence_s + 60) == 75, agent.said()
        assert "lost a peer in step" in agent.said()
        assert listing.newest(agent.job_directory)[0].step in {6, 7, 8}


@EXCHANGES
def test_a_flipped_bit_stops_the_run_and_names_the_tensor(start: Start, tmp_path: Path, exchange: str) -> None:
    """One bit of one weight of rank 1 changes in memory: the next comparison finds it, with the other ranks or, where
    all updates are in by then, of the shared parameter with the one that is trained."""
    arguments = (str(tmp_path), "--epochs", "1000", "--flip-at", "6")
    settings = json.dumps({"sparsity": 0.9, "digest_every": 4, "exchange": exchange})
    with (tmp_path / "said").open("wb") as log:
        codes = torchrun_like("stale_train.py", *arguments, "--settings", settings, start=start, log=log)
    said = (tmp_path / "said").read_text()
    assert all(codes), said
    if exchange == "updates" or "parameter 2.weight after run.prepare, or a bit of this worker's memory" not in said:
        assert "the weights of 2.weight differ between ranks" in said
        assert f"(1 of {2 if exchange == 'updates' else 6} tensors differ)" in said, "small layers are one tensor"
    steps = [kept(tmp_path, 0, rank, "end")["step"] for rank in range(2)]
    assert all(6 <= step <= 14 for step in steps), steps
