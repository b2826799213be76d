"""Whole runs of strategy local-steps: real worker processes, an island each, their own sockets between them. What was
trained is in the shared parameters, in a residual, or in an aggregator's sum: nothing else is right. Each test is a
story."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_runs import (
    Tensors,
    check_alike,
    check_every_sample_once,
    check_nothing_was_lost,
    equal,
    kept,
    left,
    lines,
    sent_in_a_round,
    sparse,
    together,
)
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES
from atoll.strategies.local_steps.plan import LocalStepsPlan

pytestmark = pytest.mark.timeout(300)

SETTINGS = {"density": 0.1, "digest_every": 3}


def local(out: Path, ranks: int, *, start: Start, run: int = 1, **settings: Any) -> FakeAgent:
    agent = sparse(out, ranks, start=start, run=run, strategy="local-steps", **{**SETTINGS, **settings})
    agent.place([f"node-{rank}" for rank in range(ranks)], [f"island-{rank}" for rank in range(ranks)])
    return agent


def islands(out: Path, names: str, *, start: Start, run: int = 1, **settings: Any) -> FakeAgent:
    """A worker for each letter, which names its island."""
    agent = local(out, len(names), start=start, run=run, **settings)
    agent.place([f"node-{rank}" for rank in range(len(names))], list(names))
    return agent


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three islands that was asked to stop in step 5: residuals are left, and aggregators' sums. For
    copies."""
    out = tmp_path_factory.mktemp("stopped")
    with local(out, 3, start=start) as agent:
        agent.start_workers("stale_train.py", str(out), "--await-stop-at", "5")
        agent.send_stop_in(5, rank=0)
        assert agent.exit_codes() == [85] * 3, agent.said()
    return out


def copy_of(run: Path, out: Path) -> list[dict[str, Any]]:
    """Lay the run's files in a folder of a test. Returns what its three ranks ended with."""
    shutil.copytree(run, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    first = [kept(out, 1, rank, "end") for rank in range(3)]
    assert any(one.any() for state in first for one in state["aggregator_sums"].values())
    return first


def test_workers_send_the_bytes_that_the_planner_counts(start: Start, tmp_path: Path) -> None:
    """Three islands train 172,000 entries, a density in each epoch, as plans say. What leaves on sockets, on average
    over the islands, is what `exchange-density` counts for each. (One tensor has most of the entries here, so its
    aggregator sends more than the others.) Densities rise: what an epoch's last round sends late counts in the next
    epoch's first step, where it must be the smaller part."""
    densities = (0.05, 0.2, 1.0)
    width = 4096
    with local(tmp_path, 3, start=start, density=densities[0], values="int4") as agent:
        agent.later_plans = [
            agent.plan(2 + i, 9 * (1 + i), (1.0,) * 3, {"density": one}) for i, one in enumerate(densities[1:])
        ]
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "3", "--hidden", str(width))
        assert agent.exit_codes() == [0] * 3, agent.said()
    asked = ExchangeDensityInput(
        entries=9 * width + 33 * width + 33 + 34,
        bandwidths=(1.0,) * 3,
        step_s=1.0,
        value_bytes=VALUE_BYTES["int4"],
        enough=1.0,
    )
    for density, sent in zip(densities, sent_in_a_round(agent, 9), strict=True):
        assert sum(sent) / 3 == pytest.approx(asked.link_s(density), rel=0.2), density
    told = sum(link.sent_bytes for links in agent.links.values() for link in links.values())
    assert told / 3 == pytest.approx(sum(9 * asked.link_s(density) for density in densities), rel=0.05)


def test_plans_change_density_turns_and_staleness_and_nothing_on_its_way_is_lost(start: Start, tmp_path: Path) -> None:
    """1. Two islands, one of two workers, train 27 steps. It begins with turns; from steps 5, 12 and 20
    on other plans hold: without, and later; with other turns, and gradients at the shared parameters; without again.
    Rounds of the plan before are under way each time. 2. Digests agree on the way, all end with the same bits, and all
    that was trained is in them."""
    paces = {2: (5, 0.1, 1, 4, "own"), 3: (12, 0.5, 2, 2, "shared_params"), 4: (20, 0.1, 1, 1, "own")}
    names, shares = "wwe", [1.0] * 3
    with islands(tmp_path, names, start=start, every=3) as agent:
        agent.later_plans = [
            agent.plan(number, step, shares, dict(zip(LocalStepsPlan.FOLLOWS, pace, strict=True)))
            for number, (step, *pace) in paces.items()
        ]
        agent.start_workers("stale_train.py", str(tmp_path))
        assert agent.exit_codes() == [0] * len(names), agent.said()
        assert agent.warnings == []
        assert all(not link.dropped for links in agent.links.values() for link in links.values())
        told = [(one.plan, one.strategy_metrics["every"]) for one in agent.steps[0]]
        assert {one.strategy_metrics["islands"] for one in agent.steps[0]} == {len(set(names))}
    assert told == [(1, 3)] * 5 + [(2, 1)] * 7 + [(3, 2)] * 8 + [(4, 1)] * 7
    begun, ended = ([kept(tmp_path, 1, rank, what) for rank in range(3)] for what in ("begin", "end"))
    shared_params = check_alike(ended, "shared_params")
    assert equal(check_alike(ended, "live"), shared_params)
    gradients = together(ended, "summed")
    check_nothing_was_lost(check_alike(begun, "shared_params"), shared_params, gradients, left(ended), "updates")


def test_gradients_at_the_shared_params_are_of_what_all_share_and_updates_of_their_own(
    start: Start, tmp_path: Path
) -> None:
    """1. Forward passes have the very shared parameters, which nobody's update is in alone; updates are made of own
    weights. From step 9 on a plan takes passes to own weights too. 2. All that was trained is in the model at the
    end."""
    names, plan = "abc", {"density": 0.1, "every": 1, "staleness": 0, "gradients": "own"}
    with islands(tmp_path, names, start=start, staleness=0, gradients="shared_params") as agent:
        agent.later_plans = [agent.plan(2, 9, [1.0] * len(names), plan)]
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2", "--look")
        assert agent.exit_codes() == [0] * len(names), agent.said()
        assert agent.warnings == []
    for rank in range(len(names)):
        looks = [json.loads(line) for line in (tmp_path / f"run-1-rank-{rank}.looks").read_text().splitlines()]
        forward, updates = ([one for one in looks if one["where"] == where] for where in ("forward", "update"))
        assert len(forward) == len(updates) == 18
        assert all(one["own"] for one in updates)
        assert [one["step"] for one in forward if one["shared_params"]][1:] == list(range(1, 10))
        assert [one["step"] for one in forward if one["own"]][1:] == list(range(10, 18))
    begun, ended = ([kept(tmp_path, 1, rank, what) for rank in range(len(names))] for what in ("begin", "end"))
    shared_params = check_alike(ended, "shared_params")
    gradients = together(ended, "summed")
    check_nothing_was_lost(check_alike(begun, "shared_params"), shared_params, gradients, left(ended), "updates")


def test_one_nan_loss_leaves_out_one_update_and_is_reported(start: Start, tmp_path: Path) -> None:
    """1. The loss of one island is NaN in step 5. Plain torch had NaN weights from there on, and so had that island for
    good: nothing of it was ever sent again. 2. Digests agree on the way, all end with the same bits, and after the
    flush at the end every other gradient, of all islands, is in them; each tensor has an aggregator."""
    with islands(tmp_path, "abc", start=start, every=4, values="int2") as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2", "--nan-at", "5")
        assert agent.exit_codes() == [0] * 3, agent.said()
        (warning,) = agent.warnings
        assert warning.startswith("rank 1, step 5: its loss was not finite; its update was left out, for the gradients")
        assert [one.non_finite for one in agent.steps[1]] == [0] * 5 + [1] * 13
        assert all(not link.dropped for links in agent.links.values() for link in links.values())
        assert agent.steps[0][-1].non_finite == agent.steps[2][-1].non_finite == 0
    begun, ended = ([kept(tmp_path, 1, rank, what) for rank in range(3)] for what in ("begin", "end"))
    shared_params = check_alike(ended, "shared_params")
    assert equal(check_alike(ended, "live"), shared_params)
    gradients = together(ended, "summed")
    check_nothing_was_lost(check_alike(begun, "shared_params"), shared_params, gradients, left(ended), "updates")
    assert {name for state in ended for name in state["aggregator_sums"]} == set(shared_params)


def test_weights_that_are_not_finite_take_the_shared_values_again(start: Start, tmp_path: Path) -> None:
    """1. Weights and moments of an island of two are NaN in part after step 7. 2. Its step 8 is left out, then it
    trains on as the other does: by AdamW, whose moments begin anew."""
    with islands(tmp_path, "wwe", start=start) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--adamw", "--poison-at", "7")
        assert agent.exit_codes() == [0] * 3, agent.said()
        for rank in (0, 1):
            left_out, anew = [one for one in agent.warnings if one.startswith(f"rank {rank},")]
            assert "its update was left out" in left_out
            assert "weights were not finite in 0.weight" in anew
            assert "state of 1 parameters begins anew" in anew
            assert agent.steps[rank][-1].non_finite == 2
    losses = {(line["rank"], line["step"]): line["loss"] for line in lines(tmp_path)}
    assert {place for place, loss in losses.items() if math.isnan(loss)} == {(0, 8), (1, 8)}
    assert max(loss for (_, step), loss in losses.items() if step >= 18) < 20
    ended = [kept(tmp_path, 1, rank, "end") for rank in range(3)]
    assert equal(check_alike(ended, "live"), check_alike(ended, "shared_params"))


@pytest.mark.parametrize("after", [3, 2])
def test_drained_and_resumed_by_as_many_or_fewer_nothing_is_lost(
    start: Start, tmp_path: Path, stopped: Path, after: int
) -> None:
    """1. Three islands are asked to stop and end with 85: residuals are left, and aggregators' sums. 2. As many go on:
    each has its own again. 3. Two go on: residuals are shared out, each aggregator has what it had summed, and one what
    the third had; what is of no aggregator now is in the shared parameters."""
    first = copy_of(stopped, tmp_path)
    with local(tmp_path, after, start=start, run=2) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * after, agent.said()
        assert agent.warnings == []
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(after)] for what in ("begin", "end"))
    for state, before in zip(begun, first, strict=False):
        stayed = state["aggregator_sums"].keys() & before["aggregator_sums"].keys()
        assert stayed
        assert all(torch.equal(state["aggregator_sums"][name], before["aggregator_sums"][name]) for name in stayed)
    if after == 3:
        assert all(
            one["aggregator_sums"].keys() == then["aggregator_sums"].keys()
            for one, then in zip(begun, first, strict=True)
        )
        assert equal(check_alike(begun, "shared_params"), check_alike(first, "shared_params"))
    check_every_sample_once(tmp_path, epochs=2)
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    check_nothing_was_lost(
        origin, check_alike(begun, "shared_params"), together(first, "summed"), left(begun), "updates"
    )
    gradients = together([*first, *second], "summed")
    check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, left(second), "updates")


def test_a_strategy_without_owners_that_goes_on_has_what_they_summed_in_its_shared_params(
    start: Start, tmp_path: Path, stopped: Path
) -> None:
    """1. Three islands are asked to stop, and aggregators have sums. 2. The next run is of `stale-sparse`, which has no
    aggregators: shared parameters have taken the sums, and nothing is lost."""
    first = copy_of(stopped, tmp_path)
    with sparse(tmp_path, 3, start=start, run=2, strategy="stale-sparse", sparsity=0.9) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 3, agent.said()
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(3)] for what in ("begin", "end"))
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    check_nothing_was_lost(
        origin, check_alike(begun, "shared_params"), together(first, "summed"), left(begun), "updates"
    )
    gradients = together([*first, *second], "summed")
    check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, left(second), "updates")


@pytest.mark.parametrize(("every", "staleness", "gradients"), [(1, 6, "own"), (3, 1, "shared_params")])
def test_a_killed_island_costs_its_own_and_no_part_counts_twice(
    start: Start, tmp_path: Path, every: int, staleness: int, gradients: str
) -> None:
    """1. Rank 2 of three is killed in step 8; its gradients were all zero, and it owned a share. 2. The others save
    what they have, though each was in another round. 3. Two go on: of what the survivors trained everything is there
    that was not on its way to the dead aggregator or in its sum, and nothing twice."""
    settings: dict[str, Any] = {"every": every, "staleness": staleness, "values": "float32", "gradients": gradients}
    with local(tmp_path, 3, start=start, run=1, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--silent-rank", "1", "--raise-at", "8")
        assert agent.workers[1].wait(timeout=120) == -signal.SIGKILL, agent.said()
        assert agent.exit_codes() == [75, -signal.SIGKILL, 75], agent.said()
        assert 8 <= listing.newest(agent.job_directory)[0].step <= 9 + staleness
    with local(tmp_path, 2, start=start, run=2, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 2, agent.said()
        (lost,) = agent.warnings
        assert lost.startswith("the residual of rank 1 of run 1 is lost")
    first = [kept(tmp_path, 1, rank, "end") for rank in (0, 2)]
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(2)] for what in ("begin", "end"))
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    dead: Tensors = kept(tmp_path, 1, 1, "begin")["aggregator_sums"]
    shared_params, rest, gradients = check_alike(begun, "shared_params"), left(begun), together(first, "summed")
    survived = [name for name in shared_params if name not in dead]
    assert 0 < len(survived) < len(shared_params)
    of = [{name: one[name] for name in survived} for one in (origin, shared_params, gradients, rest)]
    check_nothing_was_lost(of[0], of[1], of[2], of[3], "updates")
    check_alike(second, "shared_params")


def test_all_machines_lose_power_and_memory_has_residuals_and_aggregators_sums(start: Start, tmp_path: Path) -> None:
    """1. Nobody waits for the others' updates, some are always under way. 2. SIGKILL for all after a step is in memory.
    3. The next run goes on from there: every gradient up to that step is in the shared parameters, in a residual, or in
    the sum of an aggregator, who is the same. 4. It ends, and that holds again."""

    def placed(run: int) -> FakeAgent:
        agent = islands(tmp_path, "wwe", start=start, run=run)
        agent.own_directories, agent.memory = True, tmp_path / "memory"
        agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = 1, 0
        return agent

    with placed(1) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--keep-sums", "--often", "--hold-at", "9")
        agent.lose_power(5)
    with placed(2) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2")
        assert agent.exit_codes() == [0] * 3, agent.said()
    begun, ended = ([kept(tmp_path, 2, rank, what) for rank in range(3)] for what in ("begin", "end"))
    step = begun[0]["step"]
    assert step >= 5
    assert any(one.any() for state in begun for one in state["aggregator_sums"].values())
    origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
    paths = [tmp_path / f"run-1-rank-{rank}.sums-{step}" for rank in range(3)]
    first = [{"summed": torch.load(path, weights_only=True)} for path in paths]
    check_nothing_was_lost(
        origin, check_alike(begun, "shared_params"), together(first, "summed"), left(begun), "updates"
    )
    gradients = together([*first, *ended], "summed")
    check_nothing_was_lost(origin, check_alike(ended, "shared_params"), gradients, left(ended), "updates")


def test_second_moments_on_their_way_go_through_the_end_of_a_run(start: Start, tmp_path: Path) -> None:
    """1. AdamW, everything sent, no step late. Islands tell each other after 8 updates and after 16, and have each sum
    eight later. 2. The same job, all of whose workers get SIGKILL when step 10 or a later one is in memory, and are
    started anew; or it is stopped after steps 9 and 18. 3. It ends with the weights of the run that nothing happened
    to: to rounding, or bit for bit. Told anew after each stop they were others, by 0.003 to 0.014."""
    settings = {"density": 1.0, "values": "float32", "staleness": 0}
    flags = ("--adamw", "--epochs", "3")
    calm, killed, stopped = (tmp_path / name for name in ("calm", "killed", "stopped"))

    def placed(out: Path, run: int) -> FakeAgent:
        out.mkdir(exist_ok=True)
        agent = islands(out, "wwe", start=start, run=run, **settings)
        if out == killed:
            agent.own_directories, agent.memory = True, out / "memory"
            agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = 1, 0
        return agent

    def to_the_end(out: Path, run: int) -> Tensors:
        with placed(out, run) as agent:
            agent.start_workers("stale_train.py", str(out), *flags)
            assert agent.exit_codes() == [0] * 3, agent.said()
            assert all("memory" in text for text in agent.warnings), agent.warnings
        return check_alike([kept(out, run, rank, "end") for rank in range(3)], "shared_params")

    with placed(killed, 1) as agent:
        agent.start_workers("stale_train.py", str(killed), *flags, "--often", "--hold-at", "12")
        agent.lose_power(10)
    for run, step in ((1, 8), (2, 17)):
        with placed(stopped, run) as agent:
            agent.start_workers("stale_train.py", str(stopped), *flags, "--await-stop-at", str(step))
            agent.send_stop_in(step, rank=0)
            assert agent.exit_codes() == [85] * 3, agent.said()
    undisturbed = to_the_end(calm, 1)
    assert equal(to_the_end(stopped, 3), undisturbed)
    torch.testing.assert_close(to_the_end(killed, 2), undisturbed, rtol=1e-5, atol=1e-6)


def moments(out: Path, *arguments: str, start: Start, names: str = "a", **settings: Any) -> list[torch.Tensor]:
    """Adam's, of each rank of a run of noises.py; ranks are of the islands that these letters name."""
    out.mkdir()
    with sparse(out, len(names), start=start, **settings) as agent:
        agent.shares = (4.0, 3.0, 2.0, 1.0)[: len(names)]
        agent.place([f"node-{rank}" for rank in range(len(names))], list(names))
        agent.start_workers("noises.py", str(out), "40", "4", *arguments)
        assert agent.exit_codes() == [0] * len(names), agent.said()
    return [torch.load(out / f"rank-{rank}.moments", weights_only=True) for rank in range(len(names))]


def test_each_optimizer_has_the_second_moment_of_the_whole_batch(start: Start, tmp_path: Path) -> None:
    """1. Four workers of unequal batches: half of the entries mean an eighth to the last of what they mean to the
    first, of the others all see the same signal and as much noise. 2. After 40 steps the second moment of each Adam is,
    in both halves, that of one process with the whole batch. 3. Their own are from a twelfth to ten times that.
    4. So it is where updates may come four steps late, and sums nine updates later."""
    (whole,) = moments(tmp_path / "whole", start=start, strategy="dense")
    means = [half.mean() for half in whole.chunk(2)]

    def ratios(out: str, *arguments: str, **settings: Any) -> list[float]:
        """To the whole batch's, of each rank and half."""
        of_ranks = moments(tmp_path / out, *arguments, start=start, **settings)
        return [float((half / one).mean()) for each in of_ranks for half, one in zip(each.chunk(2), means, strict=True)]

    for strategy, names, late in (("local-steps", "wwee", 4), ("stale-sparse", "abcd", 1)):
        told = ratios(f"{strategy}-{names}", strategy=strategy, names=names, staleness=late)
        assert told == pytest.approx([1.0] * 8, abs=0.3), (strategy, names)
    own = ratios("own", "own", strategy="stale-sparse", names="abcd")
    assert not any(0.7 < ratio < 1.3 for ratio in own), own


def test_a_flipped_bit_of_a_shared_param_stops_the_run_and_names_the_tensor(start: Start, tmp_path: Path) -> None:
    with local(tmp_path, 2, start=start) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--flip-at", "8")
        assert 0 not in agent.exit_codes()
        assert "differ" in agent.said()


def mates_have_the_same_weights(states: Sequence[dict[str, Any]], names: str) -> None:
    for name in set(names):
        check_alike([state for state, island in zip(states, names, strict=True) if island == name], "live")


@pytest.mark.parametrize(
    ("names", "then", "flags"),
    [("wwee", "eww", []), ("weww", "wwww", ["--adamw"])],
)
def test_an_island_of_several_workers_is_one_replica_over_a_stop_and_another_membership(
    start: Start, tmp_path: Path, names: str, then: str, flags: list[str]
) -> None:
    """1. Two islands of two workers, or of three and one, are asked to stop. Workers of an island have the same
    weights, those of the two have not; what is not sent, and what aggregators summed, is the first worker's of each. 2.
    Others go on: one fewer and one of another island, or all in a single one. What was not sent, and moments, are those
    of who leads now. 3. Every gradient of every worker is in the model once."""
    settings = {"every": 4} if flags else {}
    with islands(tmp_path, names, start=start, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--await-stop-at", "5", *flags)
        agent.send_stop_in(5, rank=0)
        assert agent.exit_codes() == [85] * 4, agent.said()
    first = [kept(tmp_path, 1, rank, "end") for rank in range(4)]
    mates_have_the_same_weights(first, names)
    assert not equal(first[0]["live"], first[names.index("e")]["live"])
    leaders = {names.index("w"), names.index("e")}
    for what in ("residuals", "aggregator_sums"):
        assert {rank for rank, state in enumerate(first) if state[what]} == leaders
    with islands(tmp_path, then, start=start, run=2, **settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--epochs", "2", *flags)
        assert agent.exit_codes() == [0] * len(then), agent.said()
        alone = ["all 4 workers of this run are in one island"] if len(set(then)) == 1 else []
        assert [one.partition(":")[0] for one in agent.warnings] == alone
        assert {one.strategy_metrics["islands"] for one in agent.steps[0]} == {len(set(then))}
    begun, second = ([kept(tmp_path, 2, rank, what) for rank in range(len(then))] for what in ("begin", "end"))
    mates_have_the_same_weights(begun, then)
    check_every_sample_once(tmp_path, epochs=2)
    assert equal(check_alike(second, "live"), check_alike(second, "shared_params"))
    if not flags:
        origin: Tensors = kept(tmp_path, 1, 0, "begin")["shared_params"]
        check_nothing_was_lost(
            origin, check_alike(begun, "shared_params"), together(first, "summed"), left(begun), "updates"
        )
        gradients = together([*first, *second], "summed")
        check_nothing_was_lost(origin, check_alike(second, "shared_params"), gradients, left(second), "updates")
