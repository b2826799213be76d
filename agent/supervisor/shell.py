"""Supervisor: carries out the state machine's instructions. The only module that starts, signals and reaps workers."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from atoll.agent.links.link_probe import LinkProbe
from atoll.agent.supervisor import machine
from atoll.agent.supervisor.environments.code_store import Fetch
from atoll.agent.supervisor.inventory import InventoryTaker
from atoll.agent.supervisor.memory import MemoryFolders
from atoll.agent.supervisor.preparation import Preparation, Prepared
from atoll.agent.supervisor.processes.events import (
    CloseRequested,
    CodeReady,
    Ended,
    Event,
    FetchCode,
    ForgetRequested,
    HelloReceived,
    Instruction,
    LaunchRefused,
    LaunchRequested,
    Notify,
    Release,
    Report,
    SendSignal,
    SendStop,
    SignOfLife,
    Started,
    StartFailed,
    StartProcess,
    StopRequested,
    Ticked,
)
from atoll.agent.supervisor.processes.exits import last_words
from atoll.agent.supervisor.processes.leftover_processes import end_escaped
from atoll.agent.supervisor.processes.process import WorkerProcess, out_of_memory_kills
from atoll.agent.supervisor.progress import STALL_TIMEOUT_S, is_stopped
from atoll.agent.supervisor.rendezvous_ports import RendezvousPorts
from atoll.agent.supervisor.settings import AgentSettings
from atoll.agent.supervisor.shard_server import ShardServer
from atoll.agent.supervisor.worker_logs.logs import Logs, LogStream
from atoll.agent.supervisor.worker_logs.output import Captured, OutputPump
from atoll.agent.supervisor.worker_socket import StrategyMessages, WorkerSocket
from atoll.agent.supervisor.worker_starter import WorkerStarter
from atoll.agent.telemetry.collect import Collector
from atoll.agent.telemetry.devices import Device
from atoll.agent.tunnels.passages import OwnWorkers, Passages
from atoll.errors import AtollError, EnvironmentFailed, exit_codes
from atoll.jobs.worker_key import WorkerKey
from atoll.network.message_limits import MAX_REASON
from atoll.strategies import registry
from atoll.v1.agents_pb2 import Inventory, Launch, PlanForJob, StopWorkers, TakeInventory, View
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING, JobSpec, StrategyMessage
from atoll.v1.worker_pb2 import Alive, Welcome

logger = logging.getLogger(__name__)

TICK_S: Final = 0.2
CLOSE_GRACE_S: Final = 3.0
"""Seconds for workers to reach a step boundary and write a checkpoint when the agent shuts down."""
_OUTPUT_END_S: Final = 1.0
"""Seconds to wait for a dead worker's output; a process that left its group may still hold the pipe open."""
_KILLED_S: Final = 5.0


@dataclass(slots=True)
class _Running:
    process: WorkerProcess
    captured: Captured
    oom_kills: int
    exited: asyncio.Event
    output_ended: asyncio.Event


class Supervisor:
    """The workers of this node. `changed` is called when the controller should get a report now, `printed` when there
    is output to send."""

    def __init__(
        self,
        settings: AgentSettings,
        devices: Sequence[Device],
        fetch: Fetch,
        *,
        changed: Callable[[], None],
        printed: Callable[[], None],
    ) -> None:
        """Raises OSError if the state directory cannot be used."""
        self._settings = settings
        self._changed = changed
        self._printed = printed
        self._state = machine.State()
        self._launches: dict[WorkerKey, Launch] = {}
        self._running: dict[WorkerKey, _Running] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()
        self.address = "127.0.0.1"
        """Address at which other nodes reach this one; selects the interface of the workers."""
        self.collector = Collector(begun=changed)
        self.ports = RendezvousPorts()
        self.logs = Logs(settings.state_dir / "logs", printed)
        self.memory = MemoryFolders(settings.state_dir)
        self.shards = ShardServer(self.memory.shard_folders)
        self._inventories: deque[Inventory] = deque()
        self._inventory_taker = InventoryTaker(
            (self.memory.root, self.memory.spill), self.checkpoints_of, self._inventory_taken
        )
        self.strategy_messages = StrategyMessages()
        own = OwnWorkers(self._welcome_of, self._pid_of, lambda: self.address, lambda: self.links.port)
        self.passages = Passages(settings.name, own)
        self.links = LinkProbe(settings.name, self.passages.dial_links, printed)
        self._socket = WorkerSocket(
            settings.state_dir,
            self.collector,
            self._on_hello,
            self._on_alive,
            self.strategy_messages.put,
            on_passage=self.passages.open,
        )
        pids = settings.state_dir / "pids"
        pids.mkdir(exist_ok=True)
        self._preparation = Preparation(settings.state_dir, fetch)
        self._starter = WorkerStarter(settings, devices, pids, self._socket.endpoint)
        self._pump = OutputPump()

    @property
    def workers(self) -> Sequence[machine.Worker]:
        return tuple(self._state.workers.values())

    def registered(self) -> None:
        """A controller has registered this node: it may launch workers, and has none of their output yet."""
        self.logs.rewind()
        self._starter.wait_for_launches(self.address)

    # Requests of the controller, already checked.

    def launch(self, key: WorkerKey, launch: Launch) -> None:
        if key not in self._state.workers:
            self._launches[key] = launch
        self._feed(LaunchRequested(key, launch.spec.stall_timeout_s or STALL_TIMEOUT_S, launch.spec.hang_s))
        if key not in self._state.workers:
            del self._launches[key]

    def refuse(self, key: WorkerKey, reason: str) -> None:
        """Report a Launch that cannot be carried out as a worker that was not started."""
        self._feed(LaunchRefused(key, reason))

    def plan(self, message: PlanForJob) -> None:
        self._socket.send_plan(message)

    def view(self, view: View) -> None:
        """Forward a view. If its first member is here, the members' rendezvous is here."""
        if WorkerKey(view.job, view.run, view.members[0].member.rank) in self._state.workers:
            self.ports.release(view.master_port)
        if view.strategy:
            self.collector.begin_view(view.job, view.run, view.view, estimates=_estimates(view.strategy))
        self._socket.send_view(view)

    def strategy_message(self, key: WorkerKey, message: StrategyMessage) -> None:
        self._socket.send_strategy(key, message)

    def stop(self, message: StopWorkers) -> None:
        reason = message.reason or "asked to"
        ranks = frozenset(message.ranks)
        self._feed(StopRequested(message.job, message.run, message.grace_s, reason, time.monotonic(), ranks))

    def drop_memory(self, job: str) -> None:
        """Remove the job's checkpoints in memory, once none of its workers is here."""
        if not self._lives(job):  # the controller repeats it
            self.memory.drop(job)
            self.shards.drop(job)
            self._starter.fork_servers.forget(job)

    def _welcome_of(self, key: WorkerKey) -> Welcome | None:
        return self._socket.welcome_of(key)

    def _pid_of(self, key: WorkerKey) -> int | None:
        running = self._running.get(key)
        return running.process.pid if running is not None else None

    def _lives(self, job: str) -> bool:
        return any(worker.key.job == job and worker.phase is not machine.Phase.EXITED for worker in self.workers)

    def take_inventory(self, asked: TakeInventory) -> None:
        """Take inventory of a job's checkpoints; `next_inventory` returns the answer later."""
        if asked.remove and self._lives(asked.job):
            self._inventory_taken(Inventory(request=asked.request, troubles=["workers of the job live here"]))
            return
        if asked.remove:
            self.logs.remove(asked.job)
        self._inventory_taker.take(asked)

    def next_inventory(self) -> Inventory | None:
        return self._inventories.popleft() if self._inventories else None

    def _inventory_taken(self, inventory: Inventory) -> None:
        """Queue an inventory; called on the inventory's thread."""

        def queue() -> None:
            self._inventories.append(inventory)
            self._printed()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(queue)

    def forget(self, key: WorkerKey) -> None:
        self._feed(ForgetRequested(key))

    # Life cycle.

    async def run(self) -> None:
        """Supervise the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._socket.run(), name="worker socket")
            group.create_task(self._tick(), name="worker watch")
            group.create_task(self._preparation.watch(self._warn), name="code watch")
            group.create_task(self.passages.run(), name="passages")

    async def stop_all(self, reason: str) -> None:
        """Stop every worker in stages and start none any more. Return when all have ended; `run` must be running."""
        self._feed(CloseRequested(CLOSE_GRACE_S, reason, time.monotonic()))
        self._starter.fork_servers.close()
        beyond_s = machine.SIGTERM_TO_SIGKILL_S + _KILLED_S
        deadline_s = time.monotonic() + CLOSE_GRACE_S + beyond_s
        while self._tasks and (now_s := time.monotonic()) < deadline_s:
            await asyncio.wait(self._tasks.values(), timeout=TICK_S)
            if any(worker.progress.saves(now_s) for worker in self.workers if worker.key in self._running):
                deadline_s = max(deadline_s, now_s + beyond_s)  # the state machine ends that too
        if self._tasks:
            logger.error("workers %s did not end on SIGKILL: the kernel waits for a device or disk", [*self._running])

    async def close(self) -> None:
        """Free all resources. Remaining workers are killed at once."""
        for running in self._running.values():
            running.process.send_signal(signal.SIGKILL)
        self._starter.fork_servers.close()
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=_KILLED_S)
        for task in self._tasks.values():
            task.cancel()
        await self._preparation.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pump.close()
        self.logs.close()
        self._socket.close()
        self.ports.close()
        self._inventory_taker.close()
        self.shards.close()
        await self.links.closed()
        self.memory.close()

    async def _tick(self) -> None:
        while True:
            stopped = (key for key, running in self._running.items() if is_stopped(running.process.pid))
            self._feed(Ticked(time.monotonic(), frozenset(stopped)))
            self._starter.fork_servers.tick(time.monotonic(), self._state.workers)
            await asyncio.sleep(TICK_S)

    # Events in, instructions out.

    def _feed(self, event: Event) -> None:
        self._state, todo = machine.handle(self._state, event)
        for instruction in todo:
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case FetchCode(key):
                self._own(key, self._prepare(key, self._launches[key].spec))
            case StartProcess(key):
                self._feed(self._start(key, self._launches[key], self._preparation.of(key)))
            case SendStop(key, grace_s, reason):
                self._socket.send_stop(key, grace_s, reason)
            case SendSignal(key, number):
                if running := self._running.get(key):
                    running.process.send_signal(number)
            case Release(key):
                self._release(key)
            case Notify(key, text):
                self._warn(key, text)
            case Report():
                self._changed()

    def _warn(self, key: WorkerKey, text: str) -> None:
        self.collector.note(key, LEVEL_WARNING, text)

    def _own(self, key: WorkerKey, work: Coroutine[None, None, None]) -> None:
        """Run the waiting part of a worker's life as a task: fetching, then watching."""
        self._tasks[key] = self._loop.create_task(work, name=str(key))

        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s: %s", key, error, exc_info=error)
                self._feed(StartFailed(key, f"the agent failed: {error}"))

        self._tasks[key].add_done_callback(done)

    def _release(self, key: WorkerKey) -> None:
        self._launches.pop(key, None)
        self._preparation.release(key)
        self._socket.release(key)
        self.passages.close(key)
        self.collector.forget(key)
        if key not in self._running and (task := self._tasks.get(key)) is not None:
            task.cancel()

    # One worker.

    async def _prepare(self, key: WorkerKey, spec: JobSpec) -> None:
        try:
            await self._preparation.prepare(key, spec, partial(self.collector.note, key, LEVEL_INFO))
        except (AtollError, OSError) as error:
            if isinstance(error, EnvironmentFailed):
                with suppress(OSError):
                    self.logs.open(key).hold(error.output)
            self._feed(_failed(key, str(error)))
            return
        self._feed(CodeReady(key))

    def _start(self, key: WorkerKey, launch: Launch, prepared: Prepared) -> Started | StartFailed:
        try:
            job_directory = self._job_directory(key, launch)
            job_directory.mkdir(parents=True, exist_ok=True)
            stream = self.logs.open(key)
        except OSError as error:
            return _failed(key, f"its folders could not be made: {error}")
        self.collector.estimate(key, estimates=_estimates(launch.spec.strategy))
        welcome = self._welcome(key, launch, job_directory)
        exited = asyncio.Event()
        try:
            if key.rank == 0 and not launch.HasField("joins"):
                self.ports.release(launch.master_port)
            oom_kills = out_of_memory_kills()
            process = self._starter.start(key, launch, prepared, address=self.address, on_exit=exited.set)
        except (AtollError, OSError, ValueError) as error:
            stream.ended = True
            return _failed(key, f"the process could not be made: {error}")
        self._socket.expect(key, process.secret, welcome)  # its Hello is read by this thread: later
        captured, output_ended = self._capture(process, stream)
        self._running[key] = _Running(process, captured, oom_kills, exited, output_ended)
        self._own(key, self._watch(key))
        logger.info("%s: started as process %d", key, process.pid)
        return Started(key, process.pid, time.monotonic())

    def _welcome(self, key: WorkerKey, launch: Launch, job_directory: Path) -> Welcome:
        welcome = Welcome(
            launch=launch, job_directory=str(job_directory), speed=self._settings.speed, address=self.address
        )
        welcome.uplink_bps = self._settings.uplink_bps or 0.0
        start = launch.spec.checkpoint.start_from
        if start.job or start.directory.startswith("/"):
            welcome.start_directory = str(self.checkpoints_of(start.directory) / start.job)
        if launch.spec.checkpoint.memory_replicas:
            warning = self.memory.offer(welcome, key.job, launch.local_world_size)
            if warning and launch.local_rank == 0:
                self.collector.note(key, LEVEL_WARNING, warning)
        return welcome

    def _job_directory(self, key: WorkerKey, launch: Launch) -> Path:
        return self.checkpoints_of(launch.spec.checkpoint.directory) / key.job

    def checkpoints_of(self, directory: str) -> Path:
        """Return the parent of the folders of jobs with this `directory` on this node; for a store's URL, of files not
        yet uploaded."""
        return Path(directory) if directory.startswith("/") else self._settings.jobs

    def _capture(self, process: WorkerProcess, stream: LogStream) -> tuple[Captured, asyncio.Event]:
        ended = asyncio.Event()

        def at_end() -> None:
            stream.ended = True
            ended.set()
            self._printed()

        def threadsafe(call: Callable[[], None]) -> Callable[[], None]:
            def soon() -> None:
                self._loop.call_soon_threadsafe(call)

            return soon

        captured = Captured(process.output_fd, stream.spool, threadsafe(self._printed), threadsafe(at_end))
        self._pump.add(captured)
        return captured, ended

    async def _watch(self, key: WorkerKey) -> None:
        """Wait for the process to die, end its group and its output, then report."""
        running = self._running[key]
        await running.exited.wait()
        code = running.process.reap()
        end_escaped(running.process.secret)
        if code == exit_codes.FINISHED:  # after other exits a new worker waits for its place
            await self._preparation.look(key, self._warn)
        for then in (self._pump.cut, self._abandon):
            try:
                async with asyncio.timeout(_OUTPUT_END_S):
                    await running.output_ended.wait()
                break
            except TimeoutError:
                then(running.captured)
        del self._running[key]
        words = last_words(bytes(running.captured.recent))
        self._feed(Ended(key, code, out_of_memory_kills() > running.oom_kills, words))
        self._launches.pop(key, None)
        self._preparation.release(key)
        worker = self._state.workers.get(key)
        if worker is not None and worker.exit is not None:
            logger.info("%s: %s %s", key, worker.exit.kind.name.lower(), worker.exit.reason)

    def _abandon(self, captured: Captured) -> None:
        logger.error("the output thread does not answer: a disk under %s hangs", self._settings.state_dir)

    def _on_hello(self, key: WorkerKey) -> None:
        self._feed(HelloReceived(key, time.monotonic()))

    def _on_alive(self, key: WorkerKey, alive: Alive) -> None:
        self._feed(SignOfLife(key, alive, time.monotonic()))


def _estimates(strategy: str) -> bool:
    """Return True if the controller takes estimates of ranks in place of each step."""
    return not registry.find(strategy).asks_for_each_step


def _failed(key: WorkerKey, reason: str) -> StartFailed:
    logger.warning("%s: not started: %s", key, reason)
    return StartFailed(key, reason[:MAX_REASON])
