from __future__ import annotations

from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from made import job, run

from atoll.agent.incoming import each_worker
from atoll.controller.jobs.agents.outbox import launch, launch_of_all
from atoll.controller.jobs.model.data_keys import new_seed, private_key
from atoll.controller.jobs.records.wire import plan_to_wire
from atoll.controller.state.records import PlanRecord
from atoll.v1.agents_pb2 import ControllerMessage
from atoll.v1.common_pb2 import Plan

EARLIER = PlanRecord(run=2, id=3, from_step=7, shares=(2.0, 1.0), planner="even", reason="r", input="{}", output="{}")


def test_all_that_a_worker_needs_of_a_plan_is_sent() -> None:
    record = PlanRecord(
        run=2,
        id=3,
        from_step=7,
        shares=(2.0, 1.0),
        planner="goodput",
        reason="learns faster",
        input="{}",
        output="{}",
        measured_s=0.5,
        strategy_params={"sparsity": 0.9},
        total_batch=96,
        learning_rate_factor=1.5,
        predicted_s=0.25,
        passes=2,
    )
    assert plan_to_wire(record) == Plan(
        run=2,
        id=3,
        from_step=7,
        shares=[2.0, 1.0],
        planner="goodput",
        reason="learns faster",
        strategy_params='{"sparsity":0.9}',
        total_batch=96,
        learning_rate_factor=1.5,
        predicted_step_s=0.25,
        passes=2,
        view=1,
    )


def test_a_plan_that_says_nothing_of_batch_and_strategy_leaves_them_to_the_script() -> None:
    wire = plan_to_wire(EARLIER)
    assert (wire.total_batch, wire.learning_rate_factor, wire.strategy_params) == (0, 0.0, "")


def test_what_launches_have_in_common_and_a_ranks_own_arrive_as_one_message() -> None:
    seeded = replace(run("a", "b"), data_seed=new_seed())
    common = launch_of_all(job(), seeded, EARLIER, None, strategy="dense", reveal=True)
    launches = [ControllerMessage.FromString(launch(common, seeded, [rank])).launch for rank in range(2)]
    for rank, sent in enumerate(launches):
        assert (sent.id.job, sent.id.run, sent.id.rank) == (seeded.job, seeded.run, rank)
        assert (sent.world_size, sent.master_port, sent.spec.name) == (2, seeded.master_port, job().spec.name)
        assert [(m.rank, m.node) for m in sent.members] == [(0, "a"), (1, "b")]
        assert sent.plan == plan_to_wire(EARLIER)
        own = X25519PrivateKey.from_private_bytes(sent.keys.secret).public_key().public_bytes_raw()
        assert list(sent.keys.public).index(own) == rank
    assert launches[0].keys.public == launches[1].keys.public


def test_a_run_without_a_seed_is_launched_without_members_and_keys() -> None:
    plain = run("a")
    sent = ControllerMessage.FromString(
        launch(launch_of_all(job(), plain, EARLIER, None, strategy="dense", reveal=True), plain, [0])
    ).launch
    assert (sent.world_size, list(sent.members), sent.HasField("keys")) == (1, [], False)


def test_all_of_a_nodes_workers_are_launched_by_one_message() -> None:
    """1. 4,096 workers on 512 nodes: a message each repeated members, keys and shares of all, 1.2 GiB together. 2. Now
    a node is sent them once. 3. Its agent makes of it what it was sent for each."""
    seeded = replace(run("a", "a", "b", "a"), data_seed=new_seed())
    members = (
        replace(m, node_rank=0, local_rank=m.rank, local_world_size=3, device=7 - m.rank) for m in seeded.members
    )
    seeded = replace(seeded, members=tuple(members))
    common = launch_of_all(job(), seeded, EARLIER, None, strategy="dense", reveal=True)
    together = ControllerMessage.FromString(launch(common, seeded, [0, 1, 3])).launch
    alone = [ControllerMessage.FromString(launch(common, seeded, [rank])).launch for rank in (0, 1, 3)]
    assert each_worker(together) == alone
    assert [bytes(one.keys.secret) for one in alone] == [
        private_key(seeded.data_seed, seeded.job, seeded.run, rank) for rank in (0, 1, 3)
    ]
    added = len(launch(common, seeded, [0, 1, 3])) - len(launch(common, seeded, [0]))
    assert added < 100 < len(common)
