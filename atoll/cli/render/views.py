"""Jobs, workers, nodes and events as lines and rows of text. Pure: messages in, text out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from humanize import metric, naturalsize

from atoll.cli.render import wire
from atoll.cli.render.terminal import ago, duration, printable, shortened
from atoll.jobs.job_spec import MAX_WORKERS

if TYPE_CHECKING:
    from atoll.v1.common_pb2 import Event
    from atoll.v1.jobs_pb2 import (
        CheckpointsReply,
        Job,
        Node,
        PlansReply,
        Recovery,
        StoredCheckpoint,
        WorkerView,
    )

JOB_COLUMNS: Final = ("JOB", "PHASE", "WORKERS", ">STEP", ">LOSS", ">SAMPLES/S", "AGE", "REASON")
WORKER_COLUMNS: Final = (">RANK", "NODE", ">DEVICE", "STATE", ">BATCH", ">SHARE", ">STEP", ">TIME", ">COMPUTE", ">WAIT")
NODE_COLUMNS: Final = ("NODE", "ISLAND", "STATE", "ADDRESS", "DEVICES", "LOAD", ">MEMORY", "WORKERS", "VERSION")
PLAN_COLUMNS: Final = (">PLAN", ">STEP", "PLANNER", ">BATCH", "STRATEGY", ">PREDICTED", ">MEASURED", "REASON")
CHECKPOINT_COLUMNS: Final = ("TIER", ">STEP", ">RUN", "SHARDS", ">SIZE", ">AGE", "HEALTH", "WHERE")
SUPERVISED: Final = (
    "no strategy and no plan: a script without atoll.init, such as one for torchrun, is supervised and restarted, "
    "and splits its own data"
)
NOT_PINNED: Final = "nothing pinned"
_LINKS_SHOWN: Final = 12
_ROUNDING: Final = 1e-4
"""Smallest relative difference of answers that is shown; less is the rounding of float32."""
_BRIEF_REASON: Final = 72
_STANDBYS_SHOWN: Final = 8


def job_row(job: Job, now_s: float, *, brief: bool = False) -> tuple[str, ...]:
    """One line of `atoll jobs`. brief: a few words of the reason, for a terminal's width; `atoll status` has all."""
    progress, reason = job.progress, printable(job.reason)
    # A controller that came after the job's end knows its progress from the ends of its workers alone.
    step = progress.step or max((worker.status.step for worker in job.workers), default=0)
    return (
        job.id,
        wire.phase(job),
        f"{_alive(job)} of {bounds(job)}",
        str(step) if step else "-",
        f"{progress.metrics['loss']:.4g}" if "loss" in progress.metrics else "-",
        f"{progress.samples_per_s:.0f}" if progress.samples_per_s else "-",
        ago(job.submitted_unix_s, now_s),
        shortened(reason, _BRIEF_REASON) if brief else reason,
    )


def bounds(job: Job) -> str:
    """Return the requested number of workers: '2:8', or '4'."""
    low, high = job.spec.min_workers, job.spec.max_workers
    return str(low) if low == high else f"{low}:{high}"


def status_lines(job: Job, now_s: float) -> list[str]:
    """The head of `atoll status`, above the workers."""
    lived_s = (job.ended_unix_s or now_s) - job.submitted_unix_s
    script = " ".join([job.spec.script, *job.spec.args])
    lines = [
        f"{job.id}: {wire.phase(job)}"
        + (f", {printable(job.reason)}" if job.reason not in ("", wire.phase(job)) else ""),
        f"{printable(script)}, {bounds(job)} worker{'s' * (bounds(job) != '1')}, "
        + f"submitted {ago(job.submitted_unix_s, now_s)} ago"
        + f"{_by(job.submitted_by)}, "
        + (f"took {duration(lived_s)}" if job.ended_unix_s else f"run {job.run}, restarts {job.restarts}"),
    ]
    if job.membership:
        lines.append(f"view {job.view} of run {job.run} is {printable(job.membership)}")
    if job.cancelled_by:
        lines.append(f"cancel requested{_by(job.cancelled_by)}")
    if job.progress.step or job.progress.metrics:
        lines.append(progress_line(job))
    checkpoint = f"newest at step {job.checkpoint_step}" if job.checkpoint_step else "none yet"
    over = bool(job.ended_unix_s)  # then its memory was given back, and what went on is over too
    in_memory = f"; memory: step {job.memory_step}" if job.memory_step and not over else ""
    if only_supervised(job):
        checkpoint = "none, since no worker has called atoll.init; a script without it saves its own"
    lines.append(f"checkpoint: {checkpoint}{in_memory}")
    if job.HasField("recovery") and (job.recovery.resumed_unix_s or not over):
        lines.append(recovery_line(job.recovery, now_s))
    if only_supervised(job):
        lines.append(SUPERVISED)
        return lines + standby_lines(job)
    if job.plan.id:
        lines.append(
            f"plan {job.plan.id} ({job.plan.planner}) from step {job.plan.from_step}: {printable(job.plan.reason)}"
        )
        lines.append(prediction_text(job))
        lines.append(pins_text(job).replace(NOT_PINNED, ""))
    lines += [strategy_line(job), links_line(job), relayed_line(job), *volunteer_lines(job)]
    lines += [dropped_line(job), non_finite_line(job), *standby_lines(job)]
    return [line for line in lines if line]


def _by(who: str) -> str:
    """' (client:alice)'; nothing where it is not known."""
    return f" ({printable(who)})" if who else ""


def only_supervised(job: Job) -> bool:
    """Return True if the script seems to be one for torchrun."""
    known = job.checkpoint_step or job.memory_step or job.progress.step
    return not known and any(map(_began, job.workers)) and not any(map(_trains_here, job.workers))


def _began(worker: WorkerView) -> bool:
    return bool(worker.status.pid) or wire.state(worker.status) == "exited"


def _trains_here(worker: WorkerView) -> bool:
    return worker.status.uses_atoll


def removal_lines(job: Job, checkpoints: CheckpointsReply | None, now_s: float) -> list[str]:
    """Return what `atoll rm` would remove, before it asks. checkpoints: None if they are kept."""
    over = f"{wire.phase(job)} {ago(job.ended_unix_s, now_s)} ago"
    lines = [f"{job.id}: {over}, after {job.run} run{'s' * (job.run != 1)}", "its logs and events"]
    if checkpoints is None:
        return [*lines, "not its checkpoints on disk and in the object store"]
    by_place: dict[str, list[StoredCheckpoint]] = {}
    for one in checkpoints.checkpoints:
        if one.tier in ("disk", "store"):
            place = one.path.rpartition("/")[0] + (f" on {', '.join(one.nodes)}" if one.nodes else "")
            by_place.setdefault(place, []).append(one)
    for place, found in by_place.items():
        steps = ", ".join(str(one.step) for one in found[:8])
        shown = naturalsize(sum(one.bytes for one in found), binary=True)
        lines.append(f"{len(found)} checkpoints in {printable(place)}: {shown}, steps {steps}")
    return [*lines, *(printable(note) for note in checkpoints.notes)]


def recovery_line(recovery: Recovery, now_s: float) -> str:
    """'recovered in 3.9 s from the loss of run 3: memory, step 812, 1 step lost'; before its end: 'recovering for
    1.2 s: rank 1 on b was killed ...'."""
    if not recovery.resumed_unix_s:
        doing = "resizing" if recovery.resize else "recovering"
        return f"{doing} for {max(now_s - recovery.detected_unix_s, 0):.1f} s: {printable(recovery.cause)}"
    took_s, lost = recovery.resumed_unix_s - recovery.seen_unix_s, recovery.steps_lost
    where = "started from the beginning" if recovery.tier == "start" else f"{recovery.tier}, step {recovery.step}"
    what = "resized in {:.1f} s after run {}" if recovery.resize else "recovered in {:.1f} s from the loss of run {}"
    text = f"{what.format(took_s, recovery.run)}: {where}"
    if recovery.reached_step < recovery.step:  # whoever heard of its steps was lost as well
        return f"{text}, steps lost unknown"
    return f"{text}, {lost or 'no'} step{'s' * (lost != 1)} lost"


def standby_lines(job: Job) -> list[str]:
    """'standby d/0: the run would take 20.1 % longer (...)' for each device that waits."""
    lines = [f"standby {s.node}/{s.device}: {printable(s.reason)}" for s in job.standby]
    return _first(lines, "standby: and {} more", _STANDBYS_SHOWN)


def strategy_line(job: Job) -> str:
    """'strategy NAME: …', with what its view shows; 'strategy auto: NAME: …' if the controller chose it."""
    from atoll.strategies import registry
    from atoll.strategies.declaration import Shown, load

    strategy = registry.find(job.strategy or job.spec.strategy)
    since = f" ({printable(job.strategy_reason)})" if job.strategy_reason else ""
    name = f"auto: {strategy.name}" if job.spec.strategy == registry.AUTO else strategy.name
    if not strategy.view:
        return f"strategy {name}{since}"
    shown = Shown(
        settings=strategy.read_settings(job.strategy_settings if job.strategy else job.spec.strategy_settings),
        planned=strategy.read_plan_parameters(job.plan.strategy_params) if job.plan.id else None,
        metrics=job.progress.strategy_metrics if job.progress.step else {},
    )
    return f"strategy {name}{since}: " + "  ".join(load(strategy.view)(shown))


def prediction_text(job: Job) -> str:
    """'step 131 ms predicted, 128 ms measured (2.3 % shorter)'; empty where either is not known."""
    predicted_s, measured_s = job.plan.predicted_step_s, job.progress.step_s
    if not predicted_s or not measured_s:
        return ""
    off = measured_s / predicted_s - 1
    return (
        f"step {metric(predicted_s, 's')} predicted, {metric(measured_s, 's')} measured "
        f"({abs(off) * 100:.1f} % {'longer' if off > 0 else 'shorter'})"
    )


def pins_text(job: Job) -> str:
    """'pinned: sparsity 0.995, batch 256, shares 50 % 30 % 20 %'."""
    pins = job.pins
    said = [f"strategy {pins.strategy}"] if pins.strategy else []
    said += params_text(pins.strategy_params)
    said += [f"batch {pins.total_batch}"] if pins.total_batch else []
    if pins.shares:
        said.append("shares " + " ".join(f"{share / sum(pins.shares) * 100:.0f} %" for share in pins.shares))
    return f"pinned: {', '.join(said)}" if said else NOT_PINNED


def params_text(text: str) -> list[str]:
    """Plan parameters of a strategy: 'sparsity 0.995', '12 groups' where they are many."""
    said = json.loads(text or "{}").items()
    return [f"{len(value)} {name}" if isinstance(value, list) else f"{name} {value}" for name, value in said]


def plan_rows(reply: PlansReply) -> list[tuple[str, ...]]:
    """Return the lines of `atoll plans`: the placement, the plans, the decisions about devices and the strategy."""
    unused = ("-",) * 4
    rows: list[tuple[str, ...]] = []
    if reply.HasField("placement"):
        rows.append(("placement", "-", "placement", *unused, printable(reply.placement.reason)))
    for decided in reply.plans:
        plan = decided.plan
        rows.append(
            (
                str(plan.id),
                str(plan.from_step),
                plan.planner,
                str(plan.total_batch) if plan.total_batch else "-",
                " ".join(params_text(plan.strategy_params)) or "-",
                metric(plan.predicted_step_s, "s") if plan.predicted_step_s else "-",
                metric(decided.measured_step_s, "s") if decided.measured_step_s else "-",
                printable(plan.reason),
            )
        )
    return rows + [(f"a{one.id}", "-", one.planner, *unused, printable(one.reason)) for one in reply.admissions]


def links_line(job: Job) -> str:
    """'links 0-1 94.1 Mbit/s  1-0 idle', by rank and peer; empty where no link is known. Idle was never busy for long
    enough to tell what it carries."""
    shown = [
        f"{worker.rank}-{link.peer} {metric(link.goodput_bps, 'bit/s') if link.goodput_bps else 'idle'}"
        for worker in job.workers
        for link in worker.links
        if not link.volunteer
    ]
    return "links " + "  ".join(_first(shown, "and {} more")) if shown else ""


def relayed_line(job: Job) -> str:
    """Describe relayed links: 'through the relay: rank 2 (behind NAT in home), from and to other islands'; empty
    without any."""
    behind = [worker for worker in job.workers if worker.behind_nat]
    if not behind or len({worker.island for worker in job.workers}) < 2:
        return ""
    shown = ", ".join(f"rank {one.rank} (behind NAT in {printable(one.island)})" for one in behind[:_LINKS_SHOWN])
    rest = f" and {len(behind) - _LINKS_SHOWN} more" if len(behind) > _LINKS_SHOWN else ""
    return f"through the relay: {shown}{rest}, from and to other islands"


def volunteer_lines(job: Job) -> list[str]:
    """'volunteer friend-1/0 of rank 0: int8, 12.1 MB to it, 3.4 MB from it, 12 % of its time waits for its link,
    answers differ by 0.6 %'; of those that are there or were told to wait, the ones that wait longest first."""
    known = [(worker.rank, link) for worker in job.workers for link in worker.links if link.volunteer and link.form]
    known.sort(key=lambda one: (-one[1].wait_share, one[1].volunteer))
    lines = [
        f"volunteer {printable(link.volunteer)} of rank {rank}: {printable(link.form)}, "
        f"{naturalsize(link.sent_bytes)} to it, {naturalsize(link.received_bytes)} from it, "
        f"{100 * link.wait_share:.0f} % of its time waits for its link"
        + (f", answers differ by {100 * link.differs:.2g} %" if link.differs >= _ROUNDING else "")
        for rank, link in known
    ]
    return _first(lines, "and {} volunteers more")


def dropped_line(job: Job) -> str:
    """'dropped telemetry of 12 steps of rank 3'; empty where all came through."""
    shown = [f"{one.dropped_steps} steps of rank {one.rank}" for one in job.workers if one.dropped_steps]
    return "dropped telemetry of " + ", ".join(_first(shown, "of {} more ranks")) if shown else ""


def non_finite_line(job: Job) -> str:
    """'not finite: a loss, gradient or weight in 3 steps of rank 1'; empty where all were."""
    met = [f"{one.last.non_finite} steps of rank {one.rank}" for one in job.workers if one.last.non_finite]
    shown = ", ".join(_first(met, "some of {} more ranks"))
    return f"not finite: a loss, gradient or weight in {shown}" if met else ""


def _first(texts: list[str], more: str, limit: int = _LINKS_SHOWN) -> list[str]:
    """Return the first texts, and `more` with the number of the others if there are any."""
    return [*texts[:limit], more.format(len(texts) - limit)] if len(texts) > limit else texts


def progress_line(job: Job) -> str:
    """'step 1240  epoch 3  loss 0.1234  1830 samples/s  140 ms a step  about 12 min left'."""
    left_s = 0.0 if job.ended_unix_s else job.progress.left_s
    return figures(job) + (f"  about {duration(left_s)} left" if left_s else "")


def figures(job: Job) -> str:
    """'step 1240  epoch 3  loss 0.1234  1830 samples/s  140 ms a step'."""
    progress = job.progress
    parts = [f"step {progress.step}", f"epoch {progress.epoch}"]
    # Loss first: it is what everybody looks for.
    names = sorted(progress.metrics, key=lambda name: (name != "loss", name))
    parts += [f"{printable(name)} {progress.metrics[name]:.4g}" for name in names]
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:.0f} samples/s")
    if progress.step_s:
        parts.append(f"{metric(progress.step_s, 's')} a step")
    return "  ".join(parts)


def shares_text(job: Job) -> str:
    """'shares 50 % 31 % 19 %' by rank; empty with fewer than two workers, and where none has called atoll.init."""
    if len(job.workers) < 2 or only_supervised(job) or not any(worker.share for worker in job.workers):
        return ""
    return "shares " + " ".join(f"{worker.share:.0%}".replace("%", " %") for worker in job.workers)


def worker_row(worker: WorkerView) -> tuple[str, ...]:
    """One worker of `atoll status`."""
    last = worker.last
    return (
        str(worker.status.id.rank if worker.status.HasField("id") else worker.rank),
        worker.node,
        str(worker.device),
        _state(worker),
        str(last.local_batch) if last.total_batch else "-",
        f"{worker.share * 100:.1f} %" if worker.share and (_trains_here(worker) or not _began(worker)) else "-",
        str(last.step or worker.status.step or "-"),
        metric(last.step_s, "s") if last.step_s else "-",
        metric(last.compute_s, "s") if last.step_s else "-",
        metric(last.wait_s, "s") if last.step_s else "-",
    )


def _state(worker: WorkerView) -> str:
    """'running', and 'trained' of who has left its loop over the epochs but not ended."""
    word = wire.state(worker.status)
    return "trained" if word == "running" and worker.status.trained else word


def node_row(node: Node) -> tuple[str, ...]:
    """One line of `atoll nodes`."""
    kinds: dict[str, int] = {}
    for device in node.devices:
        slowed = f" at {device.speed:g} speed" if 0 < device.speed < 1 else ""
        more = f"{slowed}, shared by {device.sharers}" if device.sharers > 1 else slowed
        name = f"{device.kind}: {printable(device.model)}{more}" if device.model else f"{device.kind}{more}"
        kinds[name] = kinds.get(name, 0) + 1
    devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in kinds.items())
    running = sorted(
        {_place(worker.id.job, worker.id.rank) for worker in node.workers if wire.state(worker) != "exited"}
    )
    return (
        node.name,
        node.island,
        _standing(node),
        node.address,
        devices or "-",
        load_text(node) or "-",
        naturalsize(node.memory_bytes, binary=True, format="%.0f") if node.memory_bytes else "-",
        ", ".join(running) or "-",
        node.version or "-",
    )


def island_lines(nodes: Iterable[Node]) -> list[str]:
    """Return a line for each island with the reason of its nodes, as of the nodes that are connected."""
    reasons = {node.island: node.island_reason for node in nodes if node.connected}
    unknown = "no link of it is measured yet"
    return [f"island {name}: {printable(reason or unknown)}" for name, reason in sorted(reasons.items())]


def _standing(node: Node) -> str:
    if not node.connected:
        return "lost"
    return "volunteer" if node.volunteer else "behind NAT" if node.behind_nat else "connected"


def _place(job: str, rank: int) -> str:
    """'vit-12ab/3'; of a volunteer, which is no rank, 'helps vit-12ab'."""
    return f"{job}/{rank}" if rank < MAX_WORKERS else f"helps {job}"


def checkpoint_row(found: StoredCheckpoint) -> tuple[str, ...]:
    """One line of `atoll checkpoints`."""
    damaged = found.tier.endswith("memory") and found.health == "damaged"
    return (
        found.tier,
        "-" if damaged else str(found.step),
        "-" if damaged else str(found.run),
        f"{found.shards_there} of {found.shards}",
        naturalsize(found.bytes, binary=True),
        duration(found.age_s) if found.age_s >= 0 else "-",
        found.health,
        ", ".join(found.nodes) or printable(found.path) or "-",
    )


def load_text(node: Node) -> str:
    """'97 % 18 GiB 64 °C': of several devices the mean, the sum and the hottest. What none can tell is left out."""
    busy = [sample.utilisation for sample in node.samples if sample.HasField("utilisation")]
    used = [sample.memory_used_bytes for sample in node.samples if sample.HasField("memory_used_bytes")]
    warm_c = [sample.temperature_c for sample in node.samples if sample.HasField("temperature_c")]
    parts = [f"{sum(busy) / len(busy) * 100:.0f} %"] if busy else []
    parts += [naturalsize(sum(used), binary=True, format="%.0f")] if used else []
    parts += [f"{max(warm_c):.0f} °C"] if warm_c else []
    return " ".join(parts)


def event_line(event: Event) -> str:
    """'12:31:07 warning plan_issued      text'."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
    return f"{clock} {wire.level(event):7} {wire.event_kind(event):16} {printable(event.text)}"


def _alive(job: Job) -> int:
    return sum(wire.state(worker.status) in ("starting", "running") for worker in job.workers)
