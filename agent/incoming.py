"""Checks of a controller's messages: sizes, and that identity and placement fit this node.

The controller checked the job's spec when the job was submitted; the training loop checks the shares of a plan. Neither
is checked again here. A message is at most 4 MiB, which gRPC enforces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from atoll.agent.links.bursts import MAX_BURST_S
from atoll.agent.tunnels.passages import RelayAccess
from atoll.errors import BadInput
from atoll.host.ports import host_and_port
from atoll.jobs import job_spec
from atoll.jobs.job_spec import MAX_REPLICAS, MAX_WORKERS
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import HOST, JOB_ID, MAX_HOLDERS, MAX_RANK, MAX_TEXT, NODE_NAME
from atoll.network.rpc import split_address
from atoll.strategies import registry
from atoll.strategies.declaration import MAX_JSON_BYTES
from atoll.v1.agents_pb2 import (
    Launch,
    MeasureLink,
    Member,
    PlanForJob,
    Registered,
    ServeShards,
    StopWorkers,
    TakeInventory,
    UseRelay,
    View,
)
from atoll.v1.common_pb2 import Plan, StrategyMessage, WorkerId

MAX_WAIT_S: Final = 7 * 86_400.0
"""Longest grace or meeting that a message may ask for, in seconds."""
KEY_BYTES: Final = 32
MAX_LAUNCHED: Final = 64
"""Workers of one launch: as many as a node may have devices."""


def check_key(id: WorkerId) -> WorkerKey:
    """Raises BadInput, like all functions here, with the field's name and value."""
    check_job("id.job", id.job)
    _need(id.run >= 1, "id.run", id.run, "must be at least 1")
    _need(id.rank < MAX_RANK, "id.rank", id.rank, f"must be below {MAX_RANK}")
    return WorkerKey.of(id)


def check_job(name: str, job: str) -> None:
    _need(JOB_ID.fullmatch(job) is not None, name, job, "must be a job's id: a-z, 0-9 and '-'")


def check_registered(message: Registered) -> None:
    _need(0.02 <= message.heartbeat_s <= 60, "registered.heartbeat_s", message.heartbeat_s, "must be 0.02 to 60")
    _need(
        message.heartbeat_s < message.lease_s <= 3600,
        "registered.lease_s",
        message.lease_s,
        "must exceed a heartbeat and be at most 3600",
    )
    _need(0 <= message.pulse_s <= 3600, "registered.pulse_s", message.pulse_s, "must be 0 to 3600")


def check_launch(launch: Launch, devices: Collection[int]) -> None:
    """devices: the indices that this node has."""
    key = check_key(launch.id)
    _need(1 <= launch.world_size <= MAX_WORKERS, "world_size", launch.world_size, f"must be 1 to {MAX_WORKERS}")
    if launch.HasField("joins"):
        _check_joins(launch, key)
    elif launch.HasField("helping"):
        _check_helping(launch, key)
    else:
        _need(key.rank < launch.world_size, "id.rank", key.rank, f"must be below world_size {launch.world_size}")
    local_ok = 1 <= launch.local_world_size <= launch.world_size
    _need(local_ok, "local_world_size", launch.local_world_size, "must be 1 to world_size")
    _need(
        launch.local_rank < launch.local_world_size, "local_rank", launch.local_rank, "must be below local_world_size"
    )
    _need(launch.node_rank < launch.world_size, "node_rank", launch.node_rank, "must be below world_size")
    _need(launch.device in devices, "device", launch.device, f"is not one of this node's: {sorted(devices)}")
    _check_meeting(launch.master_address, launch.master_port)
    _check_outside(launch)
    strategy = registry.find(launch.spec.strategy, "spec.strategy")  # another version may lack it
    for name, value in launch.spec.secrets.items():
        _need(bool(value), f"spec.secrets.{name}", value, ". ".join(job_spec.SECRET_WITHHELD))
    check_plan("plan", launch.plan, key.run)
    if (strategy.exchanges and not launch.HasField("helping")) or launch.HasField("keys"):
        _check_exchange(launch)


def _check_joins(launch: Launch, key: WorkerKey) -> None:
    """Check the launch of a worker that joins later: with the present view, of which it is no member."""
    view = launch.joins
    check_view(view)
    _need((view.job, view.run) == (key.job, key.run), "joins.run", view.run, f"must be {key.run}, of {key.job}")
    count = len(view.members) + 1
    _need(launch.world_size == count, "world_size", launch.world_size, f"must be {count}: the view and who joins it")
    _need(not launch.others, "others", len(launch.others), "must be empty: each who joins has a launch of its own")


def _check_helping(launch: Launch, key: WorkerKey) -> None:
    """Check a volunteer's launch: a run of its own as far as it knows, and the rank that it helps."""
    helping = launch.helping
    _need(key.rank >= MAX_WORKERS, "id.rank", key.rank, f"must be at least {MAX_WORKERS}: a volunteer is no rank")
    _need(launch.world_size == 1, "world_size", launch.world_size, "must be 1 for a volunteer")
    _text("helping.name", helping.name)
    _check_meeting(helping.address, helping.port)
    sizes = {len(helping.ticket), len(helping.public_key)}
    _need(sizes == {KEY_BYTES}, "helping", f"sizes of {sorted(sizes)} bytes", f"must be {KEY_BYTES} bytes each")
    _need(bool(registry.find(launch.spec.strategy).volunteer), "spec.strategy", launch.spec.strategy, "takes no help")


def _check_meeting(address: str, port: int) -> None:
    _need(1024 <= port <= 65535, "master_port", port, "must be 1024 to 65535")
    _need(HOST.fullmatch(address) is not None, "master_address", address, "must be a host")


def check_view(view: View) -> None:
    check_job("view.job", view.job)
    _need(view.run >= 1, "view.run", view.run, "must be at least 1")
    _need(view.view >= 1, "view.view", view.view, "must be at least 1")
    _need(view.in_force <= view.view, "view.in_force", view.in_force, f"must be at most {view.view}")
    if view.strategy:  # another version may lack it
        registry.find(view.strategy, "view.strategy").read_settings(view.strategy_settings, "view.strategy_settings")
    ranks = [one.member.rank for one in view.members]
    sound = 1 <= len(set(ranks)) == len(ranks) <= MAX_WORKERS and max(ranks) < MAX_WORKERS
    _need(sound, "view.members", f"{len(ranks)} ranks", f"must be 1 to {MAX_WORKERS}, each once")
    _need(any(one.has_state for one in view.members), "view.members", "nobody", "with has_state: one at least has it")
    _check_members([one.member for one in view.members])
    sizes = {len(one.public_key) for one in view.members}
    _need(sizes in ({0}, {KEY_BYTES}), "view.members.public_key", sizes, f"must be {KEY_BYTES} bytes each, or none")
    _check_meeting(view.master_address, view.master_port)
    _seconds("view.meet_s", view.meet_s)
    _text("view.reason", view.reason)
    check_plan("view.plan", view.plan, view.run)
    _need(view.plan.view == view.view, "view.plan.view", view.plan.view, f"must be {view.view}")


def each_worker(launch: Launch) -> list[Launch]:
    """Split the launch into one for each of its workers. Checks their number alone."""
    _need(len(launch.others) < MAX_LAUNCHED, "others", f"{len(launch.others)} workers", f"fewer than {MAX_LAUNCHED}")
    others, parts = list(launch.others), [launch]
    launch.ClearField("others")
    for other in others:
        part = Launch()
        part.CopyFrom(launch)
        part.id.rank, part.local_rank, part.device = other.rank, other.local_rank, other.device
        if launch.HasField("keys"):
            part.keys.secret = other.secret
        parts.append(part)
    return parts


def _check_outside(launch: Launch) -> None:
    count = len(launch.outside)
    _need(count <= MAX_HOLDERS, "outside", f"{count} nodes", f"must be at most {MAX_HOLDERS}")
    for one in launch.outside:
        _text("outside.node", one.node)
        _need(HOST.fullmatch(one.address) is not None, "outside.address", one.address, "must be a host")
        _need(1024 <= one.port <= 65535, "outside.port", one.port, "must be 1024 to 65535")
        _need(len(one.public_key) == KEY_BYTES, "outside.public_key", len(one.public_key), f"must be {KEY_BYTES} bytes")


def _check_exchange(launch: Launch) -> None:
    """Check the members of the run and their keys; messages name only the sizes of keys."""
    ranks = [member.rank for member in launch.members]
    if launch.HasField("joins"):
        wanted = [*(one.member.rank for one in launch.joins.members), launch.id.rank]
        _need(ranks == wanted, "members", f"{len(ranks)} ranks", "must be those of the view, then who joins")
    else:
        wanted = list(range(launch.world_size))
        _need(ranks == wanted, "members", f"{len(ranks)} ranks", "must be all of the run, in order")
    _check_members(launch.members)
    sizes = {len(launch.keys.secret), *(len(key) for key in launch.keys.public)}
    _need(sizes == {KEY_BYTES}, "keys", f"sizes of {sorted(sizes)} bytes", f"must be {KEY_BYTES} bytes each")
    count = len(launch.keys.volunteers)
    _need(count in (0, KEY_BYTES), "keys.volunteers", f"{count} bytes", f"must be {KEY_BYTES} bytes or none")
    count = len(launch.keys.public)
    _need(count == launch.world_size, "keys.public", f"{count} keys", f"must be world_size = {launch.world_size}")


def _check_members(members: Sequence[Member]) -> None:
    nodes = len({member.node for member in members})
    for member in members:
        _text("members.node", member.node)
        _text("members.island", member.island)
        kept_by = list(member.holders)
        sound = len(set(kept_by)) == len(kept_by) < MAX_REPLICAS and all(node < nodes for node in kept_by)
        _need(sound, "members.holders", kept_by[:16], f"must be fewer than {MAX_REPLICAS} of {nodes} nodes")


def check_serve_shards(message: ServeShards) -> None:
    check_job("serve_shards.job", message.job)
    _need(message.run >= 1, "serve_shards.run", message.run, "must be at least 1")
    sizes = {len(key) for key in message.public}
    _need(len(message.public) <= MAX_WORKERS, "serve_shards.public", len(message.public), f"at most {MAX_WORKERS}")
    _need(sizes == {KEY_BYTES}, "serve_shards.public", sizes, f"must be {KEY_BYTES} bytes each")


def relay_access(message: UseRelay, controller: str) -> RelayAccess:
    """Return how to reach the relay. controller: the address at which this agent reaches the controller."""
    host = message.host or split_address(controller)[0]
    _need(HOST.fullmatch(host) is not None, "use_relay.host", host, "must be a host")
    _need(0 < message.port < 2**16, "use_relay.port", message.port, "must be 1 to 65535")
    _need(len(message.key) == KEY_BYTES, "use_relay.key", f"{len(message.key)} bytes", f"must be {KEY_BYTES} bytes")
    return RelayAccess(host_and_port(host, message.port), message.key)


def check_measure_link(message: MeasureLink) -> None:
    _need(NODE_NAME.fullmatch(message.node) is not None, "measure_link.node", message.node, "must be a node's name")
    _need(len(message.key) == KEY_BYTES, "measure_link.key", f"{len(message.key)} bytes", f"must be {KEY_BYTES} bytes")
    _need(0 < message.burst_s <= MAX_BURST_S, "measure_link.burst_s", message.burst_s, f"at most {MAX_BURST_S}")
    if not message.relayed:
        _need(HOST.fullmatch(message.address) is not None, "measure_link.address", message.address, "must be a host")
        _need(1024 <= message.port <= 65535, "measure_link.port", message.port, "must be 1024 to 65535")


def check_take_inventory(asked: TakeInventory) -> None:
    check_job("take_inventory.job", asked.job)
    job_spec.check_directory("take_inventory.directory", asked.directory)


def check_plan(name: str, plan: Plan, run: int) -> None:
    _need(plan.id >= 1, f"{name}.id", plan.id, "must be at least 1")
    _need(plan.run == run, f"{name}.run", plan.run, f"must be {run}")
    count = len(plan.shares)
    _need(count <= MAX_WORKERS, f"{name}.shares", f"{count} values", f"must be at most {MAX_WORKERS}")
    count = len(plan.strategy_params)
    _need(count <= MAX_JSON_BYTES, f"{name}.strategy_params", f"{count} characters", f"at most {MAX_JSON_BYTES}")
    _text(f"{name}.planner", plan.planner)
    _text(f"{name}.reason", plan.reason)


def check_plan_for_job(message: PlanForJob) -> None:
    check_job("plan.job", message.job)
    _need(message.plan.run >= 1, "plan.plan.run", message.plan.run, "must be at least 1")
    check_plan("plan.plan", message.plan, message.plan.run)


def check_strategy_message(message: StrategyMessage) -> WorkerKey:
    """Return the worker that the message is for."""
    count = len(message.body)
    _need(count <= MAX_JSON_BYTES, "strategy.body", f"{count} characters", f"must be at most {MAX_JSON_BYTES}")
    return check_key(message.id)


def check_stop(message: StopWorkers) -> None:
    check_job("stop.job", message.job)
    _seconds("stop.grace_s", message.grace_s)
    _text("stop.reason", message.reason)
    _need(len(message.ranks) <= MAX_LAUNCHED, "stop.ranks", f"{len(message.ranks)} ranks", f"at most {MAX_LAUNCHED}")


def _seconds(name: str, value: float) -> None:
    _need(0 <= value <= MAX_WAIT_S, name, value, f"must be 0 to {MAX_WAIT_S:.0f} seconds")  # refuses NaN too


def _text(name: str, value: str) -> None:
    _need(len(value) <= MAX_TEXT, name, f"{len(value)} characters", f"must be at most {MAX_TEXT}")
    _need("\0" not in value, name, value, "must not hold a zero byte")


def _need(ok: bool, name: str, value: object, must: str) -> None:
    if not ok:
        raise BadInput(f"{name} = {str(value)[:200]!r} {must}")
