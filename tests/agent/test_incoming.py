"""Messages of a controller are checked by field before anything is done about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.agent.incoming import (
    check_key,
    check_launch,
    check_plan_for_job,
    check_registered,
    check_stop,
    check_view,
)
from atoll.errors import BadInput
from atoll.v1.agents_pb2 import DataKeys, Launch, Member, PlanForJob, Registered, StopWorkers, View, ViewMember
from atoll.v1.common_pb2 import JobSpec, Plan, WorkerId

NAN = float("nan")


def good() -> Launch:
    return Launch(
        id=WorkerId(job="job-1", run=1, rank=1),
        world_size=2,
        local_world_size=1,
        node_rank=1,
        master_address="10.0.0.1",
        master_port=20_000,
        spec=JobSpec(
            name="vit",
            script="src/train.py",
            min_workers=2,
            max_workers=2,
            code_sha256="a" * 64,
            env={"A": "b"},
            args=["--x"],
        ),
        plan=Plan(id=1, run=1, shares=[1.0, 0.5]),
    )


SECRET = b"correct-horse-battery-staple-321"


def good_sparse() -> Launch:
    launch = good()
    launch.spec.strategy = "stale-sparse"
    launch.plan.strategy_params = '{"sparsity":0.99}'
    launch.members.extend(Member(rank=rank, node=f"n{rank}", island="here") for rank in range(2))
    launch.keys.CopyFrom(DataKeys(secret=SECRET, public=[bytes(32), bytes(32)]))
    return launch


def change(**fields: object) -> Callable[[Launch], None]:
    def apply(launch: Launch) -> None:
        for name, value in fields.items():
            setattr(launch, name, value)

    return apply


def spec(**fields: object) -> Callable[[Launch], None]:
    return lambda launch: launch.spec.MergeFrom(JobSpec(**fields))  # type: ignore[arg-type]


def plan(**fields: object) -> Callable[[Launch], None]:
    return lambda launch: launch.plan.MergeFrom(Plan(**fields))  # type: ignore[arg-type]


def test_good_launch_passes() -> None:
    check_launch(good(), [0])
    check_launch(good_sparse(), [0])


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("spec.secrets.TOKEN", spec(secrets={"TOKEN": ""})),  # the controller may not hand it out: no worker without
        ("spec.strategy", spec(strategy="ring")),
        ("plan.strategy_params", plan(strategy_params=" " * 20_000)),
        ("members", lambda launch: launch.ClearField("members")),
        ("members", lambda launch: setattr(launch.members[1], "rank", 0)),
        ("members.island", lambda launch: setattr(launch.members[1], "island", "x" * 5000)),
        ("keys", lambda launch: launch.ClearField("keys")),
        ("keys", lambda launch: setattr(launch.keys, "secret", SECRET[:-1])),
        ("keys", lambda launch: launch.keys.public.append(SECRET[:-1])),
        ("keys.public", lambda launch: launch.keys.public.append(bytes(32))),
    ],
)
def test_launch_over_thin_links_is_refused_by_field_without_its_secret(
    field: str, spoil: Callable[[Launch], None]
) -> None:
    launch = good_sparse()
    spoil(launch)
    with pytest.raises(BadInput, match=rf"^{field} ") as refused:
        check_launch(launch, [0])
    assert "horse" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("id.rank", lambda launch: setattr(launch.id, "rank", 2)),
        ("world_size", change(world_size=5000)),
        ("local_world_size", change(local_world_size=3)),
        ("local_rank", change(local_rank=1)),
        ("node_rank", change(node_rank=2)),
        ("device", change(device=1)),
        ("master_port", change(master_port=80)),
        ("master_address", change(master_address="a b")),
        ("plan.run", plan(run=2)),
        ("plan.shares", plan(shares=[1.0] * 5000)),
        ("plan.id", lambda launch: launch.ClearField("plan")),
    ],
)
def test_launch_is_refused_by_field(field: str, spoil: Callable[[Launch], None]) -> None:
    launch = good()
    spoil(launch)
    with pytest.raises(BadInput, match=rf"^{field}"):
        check_launch(launch, [0])


@pytest.mark.parametrize("job", ["", "A", "a/b", "..", "a" * 65, "-a", "a\n"])
def test_job_ids_are_file_names(job: str) -> None:
    with pytest.raises(BadInput, match=r"id\.job"):
        check_key(WorkerId(job=job, run=1))


def test_other_messages_are_checked_too() -> None:
    with pytest.raises(BadInput, match="run"):
        check_key(WorkerId(job="a", run=0))
    for heartbeat_s, lease_s in ((0.0, 5.0), (NAN, 5.0), (1.0, NAN), (1.0, 0.5), (100.0, 200.0)):
        with pytest.raises(BadInput, match="registered"):
            check_registered(Registered(heartbeat_s=heartbeat_s, lease_s=lease_s))
    check_registered(Registered(heartbeat_s=1.0, lease_s=5.0))
    for stop in (StopWorkers(job="A"), StopWorkers(job="a", grace_s=NAN), StopWorkers(job="a", reason="x" * 5000)):
        with pytest.raises(BadInput, match="stop"):
            check_stop(stop)
    with pytest.raises(BadInput, match="run"):
        check_plan_for_job(PlanForJob(job="a", plan=Plan(id=1, shares=[1.0])))


def good_view() -> View:
    return View(
        job="job-1",
        run=1,
        view=2,
        members=[ViewMember(member=Member(rank=rank, node=f"n{rank}"), has_state=True) for rank in (0, 2)],
        master_address="10.0.0.1",
        master_port=20_001,
        plan=Plan(id=2, run=1, view=2, shares=[1.0, 1.0]),
        meet_s=10,
        in_force=1,
    )


def nobody_has_state(view: View) -> None:
    for member in view.members:
        member.has_state = False


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("view.job", lambda view: setattr(view, "job", "../x")),
        ("view.view", lambda view: setattr(view, "view", 0)),
        ("view.in_force", lambda view: setattr(view, "in_force", 3)),
        ("view.members", lambda view: view.members.append(view.members[0])),
        ("view.members", lambda view: view.ClearField("members")),
        ("view.members", nobody_has_state),
        ("view.members.public_key", lambda view: setattr(view.members[0], "public_key", b"short")),
        ("master_port", lambda view: setattr(view, "master_port", 1)),
        ("view.meet_s", lambda view: setattr(view, "meet_s", NAN)),
        ("view.plan.view", lambda view: setattr(view.plan, "view", 1)),
    ],
)
def test_a_view_is_refused_by_field(field: str, spoil: Callable[[View], None]) -> None:
    view = good_view()
    check_view(view)
    spoil(view)
    with pytest.raises(BadInput, match=f"^{field}"):
        check_view(view)


def joining() -> Launch:
    """Rank 3 joins a run whose view 2 has two members."""
    launch = good()
    launch.id.rank, launch.world_size = 3, 3
    launch.joins.CopyFrom(good_view())
    return launch


def test_a_worker_that_joins_is_launched_beside_the_view_that_is() -> None:
    check_launch(joining(), {0})
    for field, spoil in (
        ("world_size", change(world_size=4)),
        ("joins.run", lambda launch: setattr(launch.joins, "run", 2)),
        ("view.job", lambda launch: setattr(launch.joins, "job", "")),
    ):
        launch = joining()
        if field == "joins.run":
            launch.joins.plan.run = 2
        spoil(launch)
        with pytest.raises(BadInput, match=f"^{field}"):
            check_launch(launch, {0})
