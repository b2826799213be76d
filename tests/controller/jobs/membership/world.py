"""A small world in which a run's membership changes: workers as docs/membership.md says that they behave, and a
controller that is the real decision. States are values, so that every interleaving can be visited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from made import JOB, changed, clock, exited, free, job, node, observed, run, spec

from atoll.controller.jobs.lifecycle.reconcile import next_step
from atoll.controller.jobs.model.observed import (
    JobStep,
    LaunchWorkers,
    ObservedViews,
    ObservedWorker,
    SendView,
    StopRun,
    ViewStage,
    WayIn,
    WorkerPhase,
    WorkerViewReport,
)
from atoll.controller.state.records import JobPhase, JobRecord, PlacementRecord, PlanRecord, RunRecord, WorkerExitKind
from atoll.controller.state.views import ViewCause, ViewRecord, ViewState

NODES = ("a", "b", "c")
T_S = 1000.0


@dataclass(frozen=True, slots=True)
class Process:
    """A worker. `known`: the newest view that it was told. `met`: all members of its view were connected and agreed."""

    rank: int
    node: str
    alive: bool = True
    drained: bool = False
    view: int = 1
    stage: ViewStage = ViewStage.TRAINING
    known: int = 1
    met: bool = True
    stepped: bool = True

    @property
    def stands_still(self) -> bool:
        return self.stage is not ViewStage.TRAINING and self.stage is not ViewStage.JOINING


@dataclass(frozen=True, slots=True)
class World:
    """`told`: by node, the newest view that was sent there by this leader. `kills`, `changes`, `hurries`, `joiners`:
    left."""

    job: JobRecord
    run: RunRecord
    views: tuple[ViewRecord, ...]
    plans: tuple[PlanRecord, ...]
    processes: tuple[Process, ...]
    told: tuple[tuple[str, int], ...] = ()
    launched: frozenset[int] = frozenset()
    kills: int = 2
    changes: int = 1
    hurries: int = 1
    joiners: int = 0
    violations: tuple[str, ...] = ()
    placement: PlacementRecord | None = None

    def key(self) -> tuple[object, ...]:
        """What the future depends on: neither plans nor words, but who stands where. Views that nobody living is in any
        more, or will be, are left out."""
        oldest = min([p.view or len(self.views) for p in self.processes if p.alive] + [len(self.views) - 1])
        views = tuple(
            (
                v.view,
                v.state,
                v.cause,
                v.ranks,
                v.has_state,
                v.at_boundary,
                v.wanted,
                v.in_force_unix_s,
                v.stepped_unix_s,
            )
            for v in self.views
            if v.view >= oldest
        )
        members = tuple((m.node, m.exit is not None) for m in self.run.members)
        left = (self.kills, self.changes, self.hurries, self.joiners)
        return (self.job.status.phase, views, members, self.processes, self.told, self.launched, left)

    def seen(self) -> tuple[object, ...]:
        """What the controller sees of it, and decides by: not what may yet happen, nor what only workers know."""
        phase, views, members, _, told, launched, _ = self.key()
        said = tuple((p.rank, p.node, p.alive, p.drained, p.view, p.stage, p.stepped) for p in self.processes)
        return (phase, views, members, said, told, launched, self.joiners, self.job.spec.min_workers)

    @property
    def over(self) -> bool:
        """The run is to be started again, or is done."""
        return self.job.status.phase is not JobPhase.RUNNING

    def of(self, number: int) -> ViewRecord:
        return next(view for view in self.views if view.view == number)


_decided: dict[tuple[object, ...], JobStep] = {}
"""Of worlds that the controller cannot tell apart, which are most, one is decided upon."""


def begin(least: int = 1, **fields: object) -> World:
    """Three workers that train in view 1, of a job that needs `least`."""
    record = run(*NODES)
    view = ViewRecord(
        job=JOB, run=1, view=1, state=ViewState.IN_FORCE, cause=ViewCause.LAUNCH, reason="launched",
        ranks=(0, 1, 2), has_state=(0, 1, 2), master_address="a.lan", master_port=29500, plan=1, wanted=3,
        in_force_unix_s=1.0, stepped_unix_s=2.0,
    )  # fmt: skip
    first = observed(job(spec=spec(min_workers=least, max_workers=3)), record, *(node(name) for name in NODES))
    record_job = changed(first.job, view=1)
    processes = tuple(Process(rank, name) for rank, name in enumerate(NODES))
    return World(record_job, record, (view,), first.plans.issued, processes, **fields)  # type: ignore[arg-type]


def _view_report(world: World, process: Process) -> WorkerViewReport:
    step = 10 * process.view + process.stepped
    way = WayIn(0.1, 0.2, 0.3, 0.4, 0.5) if process.stepped else WayIn(0.1, 0.2, 0.3, 0.4)
    return WorkerViewReport(process.view, process.stage, step, "it lost touch", way=way, takes_in=True)


def _worker(world: World, process: Process) -> ObservedWorker:
    if process.alive:
        return ObservedWorker(WorkerPhase.RUNNING, 10, 1, True, None, False, _view_report(world, process))
    kind = WorkerExitKind.DRAINED if process.drained else WorkerExitKind.SIGNALLED
    return ObservedWorker(WorkerPhase.EXITED, 10, 1, True, exited(kind, 85 if process.drained else -9, step=10))


def decide(world: World, *, late: bool) -> JobStep:
    """What the controller makes of the world. late: every deadline of what is waited for has passed."""
    nodes = []
    for name in NODES:
        workers = {p.rank: _worker(world, p) for p in world.processes if p.node == name}
        forgotten = {m.rank for m in world.run.members if m.exit is not None}
        alive = {rank: worker for rank, worker in workers.items() if rank not in forgotten}
        nodes.append(node(name, alive))
    lost = any(m.exit is not None and m.rank in world.views[-1].ranks for m in world.run.members)
    broken = lost or any(p.alive and p.stage is ViewStage.BROKEN for p in world.processes)
    views = ObservedViews(world.views, T_S, T_S if broken else None, T_S, {n: (v, 0) for n, v in world.told})
    occupied = {m.node for m in world.run.members if m.exit is None}
    joined = len(world.run.members) - len(NODES)
    devices = [free(name) for name in NODES if name not in occupied][: max(world.joiners - joined, 0)]
    seen = observed(
        world.job,
        world.run,
        *nodes,
        views=views,
        issued=world.plans,
        placement=world.placement,
        sent=dict.fromkeys(NODES, 99),
        free=devices,
        judged_s=T_S + 10**6,
        since_s=T_S,
    )
    return next_step(seen, clock(T_S + (400.0 if late else 0.0)))


def controlled(world: World, *, late: bool) -> World:
    """One pass: what it writes, then what it sends."""
    seen = (late, world.seen())
    if (step := _decided.get(seen)) is None:
        step = _decided[seen] = decide(world, late=late)
    merged = {view.view: view for view in (*world.views, *step.views)}
    assert step.run is not None
    job = step.job if not step.job.status.history else changed(step.job, history=())
    world = replace(
        world,
        job=job,
        run=step.run,
        views=tuple(merged[number] for number in sorted(merged)),
        plans=(*world.plans, step.plan) if step.plan is not None else world.plans,
        placement=step.placement or world.placement,
        violations=(*world.violations, *_record_violations(merged.values())),
    )
    told, launched = dict(world.told), set(world.launched)
    processes = list(world.processes)
    for action in step.actions:
        match action:
            case SendView():
                told[action.node] = max(told.get(action.node, 0), action.view)
            case LaunchWorkers(joins=True):
                [rank] = action.ranks
                if rank not in launched:
                    launched.add(rank)
                    processes.append(
                        Process(rank, action.node, view=0, stage=ViewStage.JOINING, met=False, stepped=False)
                    )
            case StopRun(ranks=ranks) if ranks:
                processes = [replace(p, alive=False, drained=True) if p.rank in ranks else p for p in processes]
            case _:
                pass
    return replace(world, told=tuple(sorted(told.items())), launched=frozenset(launched), processes=tuple(processes))


def _record_violations(views: object) -> list[str]:
    in_force = [v.view for v in views if v.state is ViewState.IN_FORCE]  # type: ignore[attr-defined]
    return [f"views {in_force} are in force at once"] if len(in_force) > 1 else []


def faults(world: World) -> Iterator[tuple[str, World]]:
    """What may happen at any moment."""
    if world.kills:
        for process in world.processes:
            if process.alive:
                dead = _put(world, replace(process, alive=False))
                yield f"kill {process.rank}", replace(dead, kills=world.kills - 1)
    if world.changes:
        yield "another leads", replace(world, told=(), changes=world.changes - 1)
    if world.hurries:
        hurried = controlled(world, late=True)
        yield "deadlines pass", replace(hurried, hurries=world.hurries - 1)


def moves(world: World) -> Iterator[tuple[str, World]]:
    """What workers and the controller do next, each by itself."""
    yield "pass", controlled(world, late=False)
    told = dict(world.told)
    for p in world.processes:
        if not p.alive:
            continue
        name, newest = str(p.rank), max(told.get(p.node, 0), p.known)
        if p.stage is ViewStage.JOINING:
            yield f"{name} is ready", _put(world, replace(p, stage=ViewStage.READY))
            continue
        waits = p.stage is ViewStage.READY and p.rank not in world.of(max(newest, 1)).ranks
        if newest > max(p.view, 1) and not waits and (p.stands_still or not world.of(newest).at_boundary):
            yield f"{name} leaves", _put(world, _left(world, replace(p, known=newest)))
        elif newest > p.known and p.stage is ViewStage.TRAINING:
            yield f"{name} is told", _put(world, replace(p, known=newest))
        if p.stage is ViewStage.TRAINING and any(not _beside(q, p.view) for q in _members(world, p.view)):
            yield f"{name} notices", _put(world, replace(p, stage=ViewStage.BROKEN))
        if p.stage is ViewStage.FORMING and p.met:
            yield f"{name} trains", _put(world, replace(p, stage=ViewStage.TRAINING, stepped=False))
        if (
            p.stage is ViewStage.FORMING
            and not p.met
            and any(not _may_meet(q, p.view) for q in _members(world, p.view))
        ):
            yield f"{name} fails", _put(world, replace(p, stage=ViewStage.FAILED))
    yield from _together(world)


def _together(world: World) -> Iterator[tuple[str, World]]:
    """What members of a view do at one moment, by agreeing on it: meet, leave at a boundary, complete a step."""
    for number in sorted({p.view for p in world.processes if p.alive and p.view}):
        members = _members(world, number)
        if all(p.alive and p.view == number and p.stage is ViewStage.FORMING and not p.met for p in members):
            yield f"view {number} meets", _put(world, *(replace(p, met=True) for p in members))
        if not all(p.alive and p.view == number and p.stage is ViewStage.TRAINING for p in members):
            continue
        if any(not p.stepped for p in members):
            yield f"a step in view {number}", _put(world, *(replace(p, stepped=True) for p in members))
        newer = min(p.known for p in members)
        if newer > number and world.of(newer).at_boundary:
            agreed = [replace(p, known=newer) for p in members]
            yield f"view {number} is left", _put(world, *(_left(world, p) for p in agreed))


def _left(world: World, p: Process) -> Process:
    """It has left every older view for the newest that it knows; or the run, where it is not in that."""
    if p.rank not in world.of(p.known).ranks:
        return replace(p, alive=False, drained=True)
    return replace(p, view=p.known, stage=ViewStage.FORMING, met=False, stepped=False)


def _beside(p: Process, view: int) -> bool:
    """Whether a peer in `view` still answers there: it trains in it, or is about to."""
    return p.alive and p.view == view and p.stage in (ViewStage.TRAINING, ViewStage.FORMING)


def _may_meet(p: Process, view: int) -> bool:
    """Whether a member may yet come to meet the others."""
    return p.alive and p.view <= view and not (p.view == view and p.stage is ViewStage.FAILED)


def _members(world: World, view: int) -> list[Process]:
    ranks = world.of(view).ranks
    return [p for p in world.processes if p.rank in ranks]


def _put(world: World, *processes: Process) -> World:
    new = {p.rank: p for p in processes}
    world = replace(world, processes=tuple(new.get(p.rank, p) for p in world.processes))
    return replace(world, violations=(*world.violations, *training_violations(world)))


def training_violations(world: World) -> list[str]:
    """More than one view whose members could all complete a step now."""
    able = [
        view.view
        for view in world.views
        if all(p.alive and p.view == view.view and p.stage is ViewStage.TRAINING for p in _members(world, view.view))
    ]
    return [f"views {able} are trained in at once"] if len(able) > 1 else []


def at_rest(world: World) -> bool:
    """The run goes on in the newest view, all its members alive and past a step; or it is to be started again."""
    if world.over:
        return True
    newest = world.views[-1]
    if newest.state is not ViewState.IN_FORCE or not newest.stepped_unix_s:
        return False
    if not all(
        p.alive and p.view == newest.view and p.stage is ViewStage.TRAINING for p in _members(world, newest.view)
    ):
        return False
    return all(p.rank in newest.ranks for p in world.processes if p.alive)
