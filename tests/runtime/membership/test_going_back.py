"""A worker is lost that had kept something for itself: the others go on in place from the newest state that is whole in
memory, with its residual. Real processes and SIGKILL; the test plays agent and controller."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_runs import (
    LR,
    check_alike,
    check_every_sample_once,
    check_nothing_was_lost,
    kept,
    left,
    lines,
    sparse,
    together,
    trained,
)
from zmq_agent import FakeAgent, Start

from atoll.agent.runtime.checkpoints.memory.shards.shard_file import content_of, parse
from atoll.errors import CheckpointError
from atoll.v1.common_pb2 import VIEW_STAGE_BROKEN, VIEW_STAGE_FAILED, VIEW_STAGE_READY, VIEW_STAGE_UNABLE

pytestmark = pytest.mark.timeout(240)

KILLED = -signal.SIGKILL
UPDATES: dict[str, Any] = {"sparsity": 0.9, "values": "float32", "digest_every": 3}
GRADIENTS: dict[str, Any] = {**UPDATES, "exchange": "gradients"}
LOCAL: dict[str, Any] = {"strategy": "local-steps", "density": 0.2, "values": "float32", "digest_every": 3}
LARGEST: dict[str, Any] = {"strategy": "compressed", "algorithm": "dgc", "density": 0.1, "min_bytes": 0}
DIVISIBLE: dict[str, Any] = {"ways": ["cpu/device/divisible"], "groups": [[6, 0]]}


def of_three(out: Path, start: Start, replicas: int, settings: dict[str, Any]) -> FakeAgent:
    agent = sparse(out, 3, start=start, **settings)
    agent.makes_views, agent.own_directories, agent.memory = True, True, out / "memory"
    agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = replicas, 0
    agent.place(["a", "b", "c", "b"], ["a", "b", "c", "b"])
    return agent


def strike_once_remembered(agent: FakeAgent, out: Path) -> None:
    """Let rank 1, which holds all up in step 16, die there: once a generation of its epoch is whole in memory."""
    epoch = 9

    def steps() -> list[int]:
        """The newest of each shard on each machine; a generation begins when the one before is whole."""
        found: dict[str, int] = {}
        for path in (out / "memory").glob("*/*.mem"):
            shard = str(path).partition("-slot-")[0]
            try:
                found[shard] = max(found.get(shard, -1), parse(content_of(path)).header.step)
            except CheckpointError:
                found.setdefault(shard, -1)  # it is being written
        return list(found.values())

    agent.wait_until(lambda: agent.alive.get(1, (0, 0))[0] >= 16)
    agent.wait_until(lambda: min(steps(), default=0) > epoch)
    (out / "strike").touch()


def train_with_rollback(
    agent: FakeAgent, out: Path, flags: tuple[str, ...], dies: tuple[str, ...], replaced: bool
) -> list[int]:
    """Rank 1 dies in step 16, and the others go on from what is in memory until they end, alone or with one in its
    stead. Returns who ends. dies: how it does, as the script's arguments say."""
    arguments = (str(out), "--keep-sums", "--often", "--sleep-s", "0.05", *flags)
    agent.start_workers("stale_train.py", *arguments, "--hold-at", "16", *dies)
    strike_once_remembered(agent, out)
    agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
    ranks = [0, 2]
    if replaced:
        ranks = [0, agent.start_joiner("stale_train.py", *arguments), 2]
        agent.wait_until(lambda: agent.stands_at(ranks[1])[1] == VIEW_STAGE_READY)
    agent.send_view(2, ranks, [1.0] * len(ranks), plan_id=2, without_state=ranks[1:-1])
    agent.put_in_force()
    assert agent.exit_codes() == [0, KILLED, 0, 0][: 1 + len(ranks)], agent.said()
    return ranks


CASES = [
    (UPDATES, ("--raise-at", "16"), False),
    (GRADIENTS, ("--raise-at", "16"), False),
    (LOCAL, ("--raise-at", "16"), True),
    (LARGEST, ("--fault", "16:2:die"), False),
]


@pytest.mark.parametrize(("settings", "dies", "replaced"), CASES, ids=["updates", "gradients", "local", "compressed"])
def test_who_is_left_goes_on_with_the_residuals_of_all(
    tmp_path: Path, start: Start, settings: dict[str, Any], dies: tuple[str, ...], replaced: bool
) -> None:
    """1. Three workers keep each other's state in memory, and send a tenth of it in each step; one dies, or does when
    it has sent its gradients and not what it summed of them. 2. The other two go back in the same process, alone or
    with one that starts in its stead, to the newest step that is whole in memory: shared parameters are the same, and
    what the dead one had not sent until then is another's. 3. They end: all gradients that count are in the shared
    parameters or still residuals, and each sample counted once an epoch."""
    with of_three(tmp_path, start, 2, settings) as agent:
        agent.params = DIVISIBLE if settings is LARGEST else {}
        ranks = train_with_rollback(agent, tmp_path, (), dies, replaced)
    again = [line for line in trained(tmp_path) if line["view"] == 2]
    step = min(line["step"] for line in again)
    assert 9 < step <= 16
    assert sorted(line["step"] for line in again) == sorted([*range(step, 27)] * len(ranks))
    check_every_sample_once(tmp_path, epochs=3)
    ended = [kept(tmp_path, 1, rank, "end") for rank in ranks]
    lost = {"summed": torch.load(tmp_path / f"run-1-rank-1.sums-{step}", weights_only=True)}
    gradients, residuals = together([*ended, lost], "summed"), together(ended, "residuals")
    origin = kept(tmp_path, 1, 0, "begin")["shared_params"]
    shared_params = check_alike(ended, "shared_params")
    sums = together(ended, "aggregator_sums")
    for name, one in sums.items():  # of shared parameters, what they are behind by
        residuals[name] = residuals[name] + one
    exchange = "gradients" if settings is LARGEST else settings.get("exchange", "updates")
    check_nothing_was_lost(origin, shared_params, gradients, residuals, exchange)


@pytest.mark.parametrize(("lost_in_update", "replaced"), [((), True), ((), False), (("--lose-in-update", "16"), True)])
def test_second_moments_that_islands_tell_each_other_are_those_of_the_same_islands(
    tmp_path: Path, start: Start, replaced: bool, lost_in_update: tuple[str, ...]
) -> None:
    """1. Three islands train by AdamW, all is sent, no step late. They told each other of their second moments after 8
    updates, and would have the sum after 16; one is killed in step 16, and a step between is in memory. Who hears of it
    within its optimizer's step goes on as the others. 2. With one in its stead they go on with that sum, and end with
    the weights of the run that nothing happened to. 3. The two that are left alone begin to tell each other anew: a sum
    without the third's part was too small."""
    settings = {**LOCAL, "density": 1.0, "staleness": 0}
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    for out in (calm, struck):
        out.mkdir()
    with of_three(struck, start, 2, settings) as agent:
        ranks = train_with_rollback(agent, struck, ("--adamw",), ("--raise-at", "16", *lost_in_update), replaced)
    step = min(line["step"] for line in trained(struck) if line["view"] == 2)
    assert 9 < step <= 16
    ended = [kept(struck, 1, rank, "end") for rank in ranks]
    shared_params = check_alike(ended, "shared_params")
    if not replaced:
        assert [state["telling"] for state in ended] == [[step, 0, 1]] * 2
        return
    assert [state["telling"] for state in ended] == [[0, 0, 1, 2]] * 3
    with of_three(calm, start, 2, settings) as agent:
        agent.start_workers("stale_train.py", str(calm), "--adamw")
        assert agent.exit_codes() == [0] * 3, agent.said()
    expected = check_alike([kept(calm, 1, rank, "end") for rank in range(3)], "shared_params")
    torch.testing.assert_close(shared_params, expected, rtol=1e-5, atol=1e-6)


def test_an_island_of_four_is_lost_and_is_back_and_nothing_of_its_residual_is_lost(
    tmp_path: Path, start: Start
) -> None:
    """1. Four islands send a tenth of what they learn, in two bits, and keep each other's state in memory. One gets
    SIGKILL in step 16 of 36. 2. Three go on from memory with what it had not sent. 3. It is taken back after step 22,
    at a boundary. 4. All gradients that count, those of the lost one up to the step in memory too, are in the
    shared parameters, a residual or an aggregator's sum, and each sample counts once."""
    settings = {**LOCAL, "density": 0.1, "values": "int2"}
    with sparse(tmp_path, 4, start=start, **settings) as agent:
        agent.makes_views, agent.own_directories, agent.memory = True, True, tmp_path / "memory"
        agent.spec.checkpoint.memory_replicas, agent.spec.checkpoint.every_steps = 2, 0
        agent.place(list("abcdb"), list("abcdb"))
        arguments = (str(tmp_path), "--keep-sums", "--often", "--epochs", "4", "--await-view-at", "22")
        agent.start_workers("stale_train.py", *arguments, "--hold-at", "16", "--raise-at", "16")
        strike_once_remembered(agent, tmp_path)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2, 3)
        agent.send_view(2, [0, 2, 3], [1.0] * 3, plan_id=2)
        back = agent.start_joiner("stale_train.py", *arguments)
        agent.put_in_force()
        agent.wait_until(lambda: agent.stands_at(back)[1] == VIEW_STAGE_READY)
        agent.wait_until(lambda: agent.alive[0][0] >= 22)
        members = [0, back, 2, 3]
        agent.send_view(3, members, [1.0] * 4, plan_id=3, in_force=2, without_state=[back], at_boundary=True)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, 0, 0, 0], agent.said()
    first = {view: min(line["step"] for line in trained(tmp_path) if line["view"] == view) for view in (2, 3)}
    assert 9 < first[2] <= 16
    assert 22 <= first[3] < 36
    check_every_sample_once(tmp_path, epochs=4)
    ended = [kept(tmp_path, 1, rank, "end") for rank in members]
    lost = {"summed": torch.load(tmp_path / f"run-1-rank-1.sums-{first[2]}", weights_only=True)}
    residuals, sums = together(ended, "residuals"), together(ended, "aggregator_sums")
    check_nothing_was_lost(
        kept(tmp_path, 1, 0, "begin")["shared_params"],
        check_alike(ended, "shared_params"),
        together([*ended, lost], "summed"),
        {name: one + sums[name] for name, one in residuals.items()},
        "updates",
    )


def test_a_second_loss_before_the_new_view_has_a_copy_of_its_own(tmp_path: Path, start: Start) -> None:
    """1. Three workers keep each other's state twice; one dies, and the other two go back. 2. As soon as their view is
    in force one of them dies too. 3. The last one goes on alone: copies of the first view stayed until there were newer
    ones, so nothing of either is lost."""
    with of_three(tmp_path, start, 3, UPDATES) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--keep-sums", "--often", "--sleep-s", "0.05",
                            "--hold-at", "16", "--raise-at", "16", "--epochs", "8")  # fmt: skip
        strike_once_remembered(agent, tmp_path)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        agent.workers[2].send_signal(signal.SIGKILL)
        agent.wait_for_stage(2, VIEW_STAGE_BROKEN, 0)
        agent.send_view(3, [0], [1.0], plan_id=3, in_force=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, KILLED], agent.said()
    check_every_sample_once(tmp_path, epochs=8)
    ended = kept(tmp_path, 1, 0, "end")
    steps = {view: min(line["step"] for line in lines(tmp_path) if line["view"] == view) for view in (2, 3)}
    lost = [
        {"summed": torch.load(tmp_path / f"run-1-rank-{rank}.sums-{step}", weights_only=True)}
        for rank, step in ((1, min(steps.values())), (2, steps[3]))
    ]
    gradients, origin = together([ended, *lost], "summed"), kept(tmp_path, 1, 0, "begin")["shared_params"]
    check_nothing_was_lost(origin, ended["shared_params"], gradients, together([ended], "residuals"), "updates")


@pytest.mark.parametrize("settings", [UPDATES, GRADIENTS, LOCAL, LARGEST], ids=["updates", "gradients", "local", "dgc"])
def test_a_second_loss_while_the_others_go_back(tmp_path: Path, start: Start, settings: dict[str, Any]) -> None:
    """As above, and the second one dies when both have gone back and begin the view: it never comes about."""
    with of_three(tmp_path, start, 3, settings) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--keep-sums", "--often", "--sleep-s", "0.05",
                            "--hold-at", "16", "--raise-at", "16", "--die-in-view", "starting")  # fmt: skip
        strike_once_remembered(agent, tmp_path)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.wait_for_stage(2, VIEW_STAGE_FAILED, 0)
        agent.send_view(3, [0], [1.0], plan_id=3)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, KILLED], agent.said()
    check_every_sample_once(tmp_path, epochs=3)
    ended, origin = kept(tmp_path, 1, 0, "end"), kept(tmp_path, 1, 0, "begin")["shared_params"]
    back = min(line["step"] for line in lines(tmp_path) if line["view"] == 3)
    lost = [{"summed": torch.load(tmp_path / f"run-1-rank-{rank}.sums-{back}", weights_only=True)} for rank in (1, 2)]
    exchange = "gradients" if settings in (GRADIENTS, LARGEST) else "updates"
    check_nothing_was_lost(origin, ended["shared_params"], together([ended, *lost], "summed"), left([ended]), exchange)


def test_without_a_copy_of_what_is_lost_it_starts_again_and_says_so(tmp_path: Path, start: Start) -> None:
    """1. As above, but nobody keeps another's state in memory, and moments are those of all. 2. The survivors say what
    is missing, save what they have as they would without views, and end with 75."""
    with of_three(tmp_path, start, 1, GRADIENTS) as agent:
        agent.start_workers("stale_train.py", str(tmp_path), "--often", "--sleep-s", "0.05", "--raise-at", "7")
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        assert agent.exit_codes() == [75, KILLED, 75], agent.said()
        assert [agent.stands[rank][-1].stage for rank in (0, 2)] == [VIEW_STAGE_UNABLE] * 2
        assert "memory_replicas" in agent.stands[0][-1].reason
        assert any("checkpoint" in line for line in agent.said().splitlines() if "lost a peer" in line), agent.said()


@pytest.mark.parametrize("flags", [(), ("--lose-in-update", "24")], ids=["between updates", "in an update"])
@pytest.mark.parametrize("settings", [UPDATES, LOCAL], ids=["updates", "local"])
def test_without_a_copy_that_is_worth_it_the_others_go_on_as_they_are(
    tmp_path: Path, start: Start, settings: dict[str, Any], flags: tuple[str, ...]
) -> None:
    """1. Three workers send a part of what they learn. The copies of each other's state in memory are of step 12 or so:
    more training ago than is done again. One dies in step 24. 2. The others go on in the same processes where they
    stand, and end with the same shared parameters; nobody trains a step twice. People are told."""
    old = ("--adamw", "--often", "--seldom-from", "3", "--goes-back-s", "0.001")
    with of_three(tmp_path, start, 2, settings) as agent:
        arguments = (str(tmp_path), "--keep-sums", "--sleep-s", "0.02", "--raise-at", "24", *old)
        agent.start_workers("stale_train.py", *arguments, *flags)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, 0], agent.said()
        assert any("as they are" in notice.text for notice in agent.notices), agent.notices
    again = [line["step"] for line in trained(tmp_path) if line["view"] == 2]
    assert 24 <= min(again) <= 26
    for rank in (0, 2):
        steps = [line["step"] for line in lines(tmp_path) if line["rank"] == rank and line["view"] == 2]
        assert steps == list(range(min(again), max(again) + 1))
    check_alike([kept(tmp_path, 1, rank, "end") for rank in (0, 2)], "shared_params")


@pytest.mark.parametrize(
    ("settings", "flags"),
    [({**UPDATES, "sparsity": 0.0}, ()), ({**LOCAL, "density": 1.0}, ("--behind",))],
    ids=["updates", "local"],
)
def test_who_goes_on_as_it_is_has_all_that_was_sent_and_all_of_its_own(
    tmp_path: Path, start: Start, settings: dict[str, Any], flags: tuple[str, ...]
) -> None:
    """As above, nobody has a copy at all, and everything is sent in each step. Shared parameters and residuals have
    every update that the survivors made, and of the lost rank, layer by layer, all up to the step that it died in or
    one of the two before. A survivor that is behind the others skips what is left of the steps that they have made, and
    a warning says so."""
    with of_three(tmp_path, start, 1, settings) as agent:
        arguments = (str(tmp_path), "--keep-sums", "--sleep-s", "0.02", "--raise-at", "24", *flags)
        agent.start_workers("stale_train.py", *arguments)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, 0], agent.said()
        assert any("as they are" in notice.text for notice in agent.notices), agent.notices
        behind = [notice.text for notice in agent.notices if "behind" in notice.text]
        assert behind or not flags, agent.notices
    ended = [kept(tmp_path, 1, rank, "end") for rank in (0, 2)]
    shared_params, begun = check_alike(ended, "shared_params"), kept(tmp_path, 1, 0, "begin")["shared_params"]
    residuals, sums, made = together(ended, "residuals"), together(ended, "aggregator_sums"), together(ended, "summed")
    sent = [torch.load(tmp_path / f"run-1-rank-1.sums-{step}", weights_only=True) for step in (22, 23, 24)]
    for name, shared_param in shared_params.items():
        way = (begun[name].double() - shared_param.double() + residuals[name] + sums.get(name, 0)) / LR
        off = [float((way - made[name] - one[name]).abs().max()) for one in sent]
        assert min(off) < 1e-3, (name, off)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        *itertools.product([{**UPDATES, "sparsity": 0.0}, {**LOCAL, "density": 1.0}],
                           ["taking over", "building", "starting"]),
        (LOCAL, "starting"),
    ],
)  # fmt: skip
def test_a_second_loss_while_the_others_take_over_what_they_have(
    tmp_path: Path, start: Start, settings: dict[str, Any], where: str
) -> None:
    """1. Of three workers one dies, and nobody has a copy: the other two go on as they are. 2. While they take over
    what they have, or begin anew with it, one of them dies too. 3. The last one goes on alone from where it stood;
    it trains no step twice. Where everything is sent in each step, its shared parameters have all that it ever made,
    and of the lost ones all up to the step that they died in or one of the two before, layer by layer."""
    with of_three(tmp_path, start, 1, settings) as agent:
        arguments = (str(tmp_path), "--keep-sums", "--sleep-s", "0.02", "--raise-at", "24", "--die-in-view", where)
        agent.start_workers("stale_train.py", *arguments)
        agent.wait_for_stage(1, VIEW_STAGE_BROKEN, 0, 2)
        agent.send_view(2, [0, 2], [1.0, 1.0], plan_id=2)
        agent.wait_until(lambda: agent.workers[2].poll() is not None)
        agent.wait_for_stage(2, VIEW_STAGE_FAILED, 0)
        agent.send_view(3, [0], [1.0], plan_id=3)
        agent.put_in_force()
        assert agent.exit_codes() == [0, KILLED, KILLED], agent.said()
    own = [line["step"] for line in lines(tmp_path) if line["rank"] == 0 and line["view"] == 3]
    assert 24 <= own[0] <= 26
    assert own == list(range(own[0], own[-1] + 1))
    if settings.get("sparsity", 1.0) > 0 and settings.get("density") != 1.0:
        return
    ended, begun = kept(tmp_path, 1, 0, "end"), kept(tmp_path, 1, 0, "begin")["shared_params"]
    lacking = left([ended])
    sent = [[torch.load(tmp_path / f"run-1-rank-{rank}.sums-{step}", weights_only=True) for step in (22, 23, 24)
             if (tmp_path / f"run-1-rank-{rank}.sums-{step}").exists()] for rank in (1, 2)]  # fmt: skip
    for name, shared_param in ended["shared_params"].items():
        way = (begun[name].double() - shared_param.double() + lacking[name]) / LR
        off = [float((way - ended["summed"][name] - one[name] - two[name]).abs().max())
               for one in sent[0] for two in sent[1]]  # fmt: skip
        assert min(off) < 1e-3, (name, off)
