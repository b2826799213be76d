"""Follow one job to its end: progress, events and the output of rank 0, for a terminal, a pipe or a program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Protocol

from atoll.cli.render import terminal, views, wire
from atoll.cli.render.log_lines import LogLines
from atoll.errors import DeadlineExceeded, JobCancelled, JobFailed

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.common_pb2 import Event
    from atoll.v1.jobs_pb2 import Job, WorkerView

_PROGRESS_EVERY_S: Final = 2.0
_LAST_WORDS_S: Final = 5.0
_LAST_LINES: Final = 10


class Screen(Protocol):
    """Display of a followed job."""

    def job(self, job: Job) -> None: ...
    def event(self, event: Event) -> None: ...
    def line(self, run: int, rank: int, text: str) -> None: ...


async def follow(client: AsyncClient, job: str, screen: Screen, timeout_s: float | None) -> Job:
    """Show the job until it has ended; return its last state.

    Raises DeadlineExceeded after timeout_s; the job goes on.
    """
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            beside = [
                group.create_task(_events(client, job, screen), name=f"events of {job}"),
                group.create_task(_output(client, job, screen), name=f"output of {job}"),
            ]
            last = None
            async with aclosing(client.watch(job)) as changes:
                async for last in changes:
                    screen.job(last)
            # The job has ended; its last events and lines are on their way.
            _, late = await asyncio.wait(beside, timeout=_LAST_WORDS_S)
            for task in late:
                task.cancel()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{job} did not end within {timeout_s:g} s. It goes on: atoll status {job}") from error
    except ExceptionGroup as errors:
        raise terminal.innermost(errors) from errors
    assert last is not None
    return last


async def _events(client: AsyncClient, job: str, screen: Screen) -> None:
    async with aclosing(client.events(job, follow=True)) as events:
        async for event in events:
            screen.event(event)


async def _output(client: AsyncClient, job: str, screen: Screen) -> None:
    lines = LogLines()
    async with aclosing(client.logs(job, rank=0, follow=True)) as chunks:
        async for chunk in chunks:
            for line in lines.of(chunk):
                screen.line(*line)
    for line in lines.rest():
        screen.line(*line)


async def last_words(client: AsyncClient, job: Job) -> list[str]:
    """The newest lines of the worker that failed first; empty where none is to blame."""
    worker = culprit(job)
    if worker is None:
        return []
    lines, found = LogLines(), []
    stream: AsyncIterator[Any] = client.logs(job.id, rank=worker.rank, tail_lines=_LAST_LINES)
    async for chunk in stream:
        found += [text for run, _, text in lines.of(chunk) if run == job.run]
    found += [text for run, _, text in lines.rest() if run == job.run]
    return found[-_LAST_LINES:]


def culprit(job: Job) -> WorkerView | None:
    """The worker whose own failure ended the job: not one that only lost a peer or was stopped because of it."""
    from atoll.v1 import common_pb2 as common

    own = (
        common.EXIT_KIND_FAILED,
        common.EXIT_KIND_SIGNALLED,
        common.EXIT_KIND_UNRESPONSIVE,
        common.EXIT_KIND_NOT_STARTED,
    )
    failed = [worker for worker in job.workers if worker.status.exit_kind in own]
    exact = [worker for worker in failed if job.exit_code and worker.status.exit_code == job.exit_code]
    return next(iter(exact or failed), None)


def verdict(job: Job) -> None:
    """Say how it ended. Raises JobFailed or JobCancelled unless it is done."""
    from atoll.v1 import jobs_pb2 as pb

    if job.phase == pb.PHASE_DONE:
        terminal.note(f"{job.id} done: {views.progress_line(job)}" if job.progress.step else f"{job.id} done")
        return
    reason = terminal.printable(job.reason) or "no reason was given"
    if job.phase == pb.PHASE_CANCELLED:
        why = "" if reason == "cancelled" else f": {reason}"
        on = f" It goes on, as a new job, with: atoll restore {job.id}" if job.checkpoint_step else ""
        raise JobCancelled(f"{job.id} was cancelled{why}.{on}")
    worker = culprit(job)
    who = ""
    if worker is not None:
        name = f"rank {worker.rank} on {worker.node}"
        if not reason.startswith(name):  # the reason itself names another, or nobody
            who = f" {name} ended with exit code {worker.status.exit_code}"
            if worker.status.reason and worker.status.reason not in reason:
                who += f" ({terminal.printable(worker.status.reason)})"
            who += ","
    raise JobFailed(f"{job.id} failed:{who} {reason}. Its output: atoll logs {job.id}")


_PHASES: Final = frozenset(
    {
        "submitted",
        "queued",
        "starting",
        "running",
        "stopping",
        "done",
        "failed",
        "cancelled",
        "cancel_requested",
    }
)


def _is_shown_elsewhere(event: Event) -> bool:
    """Return whether the screen shows it otherwise: phases with the job, rank 0's notices in its output."""
    kind = wire.event_kind(event)
    return kind in _PHASES or (kind == "worker_notice" and wire.level(event) == "info" and event.rank == 0)


class PlainScreen:
    """LogLines for a pipe, a file or CI: changes at once, progress at most every two seconds."""

    def __init__(self) -> None:
        self._phase = ""
        self._shown_s = 0.0
        self._line = ""

    def job(self, job: Job) -> None:
        now_s = time.monotonic()
        phase = f"{job.id} {wire.phase(job)}" + (f": {terminal.printable(job.reason)}" if job.reason else "")
        if phase != self._phase:
            self._phase = phase
            terminal.note(phase)
        line = "  ".join(part for part in (views.progress_line(job), views.shares_text(job)) if part)
        if job.progress.step and line != self._line and now_s - self._shown_s >= _PROGRESS_EVERY_S:
            self._shown_s, self._line = now_s, line
            terminal.note(line)

    def event(self, event: Event) -> None:
        if not _is_shown_elsewhere(event):
            terminal.note(views.event_line(event))

    def line(self, run: int, rank: int, text: str) -> None:
        terminal.note(f"[{rank}] {_visible(text)}")


class JsonScreen:
    """JSON lines on stdout, each with its `type`: job, event or log."""

    def job(self, job: Job) -> None:
        terminal.print_json({"type": "job", **wire.to_plain(job)})

    def event(self, event: Event) -> None:
        terminal.print_json({"type": "event", **wire.to_plain(event)})

    def line(self, run: int, rank: int, text: str) -> None:
        terminal.print_json({"type": "log", "run": run, "rank": rank, "text": text})


def bar(job: Job) -> Any:
    """Return a rich renderable; None if the script has not reported for how many epochs it trains.

    The time that is left is the controller's estimate: rich's own would begin again with each update.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    share = job.progress.trained_share
    if not share:
        return None
    left_s = 0.0 if job.ended_unix_s else job.progress.left_s
    shown = Progress(BarColumn(bar_width=40), TaskProgressColumn(), TextColumn("{task.description}"))
    shown.add_task(
        f"about {terminal.duration(left_s)} left" if left_s else "", total=1000, completed=round(1000 * share)
    )
    return shown.get_renderable()


class LiveScreen:
    """Events and output scroll by above. A bar with the time that is left, figures and the workers' shares stay at the
    bottom. Used inside `with screen.live`."""

    def __init__(self, *, stderr: bool = True, on_ctrl_c: str = "") -> None:
        """on_ctrl_c: the last line of the display."""
        from rich.console import Console
        from rich.live import Live

        self._console, self._on_ctrl_c = Console(stderr=stderr, highlight=False), on_ctrl_c
        self.live = Live(console=self._console, refresh_per_second=4, transient=not stderr)

    def job(self, job: Job) -> None:
        from rich.console import Group
        from rich.text import Text

        phase = wire.phase(job)
        style = terminal.STYLES.get(phase, "")
        head = Text.assemble((job.id, "bold"), "  ", (phase, style), "  ", (terminal.printable(job.reason), "dim"))
        parts: list[Any] = [Text(), head]
        if job.progress.step or job.progress.metrics:
            epochs = bar(job)
            parts += [epochs, Text(views.figures(job))] if epochs else [Text(views.progress_line(job))]
        if job.workers:
            rows = [_worker_row(worker) for worker in job.workers[:_MOST_WORKERS_SHOWN]]
            columns, rows = fitting(rows, self._console.width)
            parts.append(terminal.rich_table(columns, rows))
        if len(job.workers) > _MOST_WORKERS_SHOWN:
            parts.append(Text(f"and {len(job.workers) - _MOST_WORKERS_SHOWN} more: atoll status {job.id}", "dim"))
        if phase not in ("done", "failed", "cancelled"):
            parts.append(Text(self._on_ctrl_c, "dim"))
        self.live.update(Group(*parts))

    def event(self, event: Event) -> None:
        from rich.text import Text

        if not _is_shown_elsewhere(event):
            self._console.print(Text(views.event_line(event), terminal.STYLES.get(wire.level(event), "")))

    def line(self, run: int, rank: int, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.assemble((f"[{rank}] ", "cyan"), _visible(text)))


class LogScreen(LiveScreen):
    """Lines scroll by above on stdout; the job's bar and figures stay below them."""

    def __init__(self) -> None:
        super().__init__(stderr=False)

    def job(self, job: Job) -> None:
        from rich.console import Group
        from rich.text import Text

        head = f"{job.id} {wire.phase(job)}"
        below = Text(f"{head}  {views.figures(job)}" if job.progress.step else head, "dim", no_wrap=True)
        self.live.update(Group(*filter(None, (bar(job), below))))

    def text(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    async def show(self, client: AsyncClient, job: str, lines: Coroutine[Any, Any, None]) -> None:
        """Show the job below until `lines` has ended, or raise its exception."""

        async def watch() -> None:
            async with aclosing(client.watch(job)) as changes:
                async for one in changes:
                    self.job(one)

        watching = asyncio.create_task(watch(), name=f"state of {job}")
        try:
            with self.live:
                await lines
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)  # an error of the cluster ends `lines` too


_MOST_WORKERS_SHOWN: Final = 12
_LIVE_COLUMNS: Final = (">RANK", "NODE", "STATE", ">BATCH", ">SHARE", "", ">TIME", ">WAIT")
_DISPENSABLE: Final = ("", "STATE", ">WAIT", ">TIME", ">BATCH")
"""What a narrow terminal goes without, in this order."""
_BAR: Final = 20


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    rank, node, _, state, batch, share, _, time_text, _, wait = views.worker_row(worker)
    part = "\u2501" * round(worker.share * _BAR)
    return rank, node, state, batch, share, part.ljust(_BAR), time_text, wait


def fitting(rows: list[tuple[str, ...]], width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns of the workers' table that a terminal of that width has room for, and their rows."""
    columns: tuple[str, ...] = _LIVE_COLUMNS
    for name in _DISPENSABLE:
        widths = [max(len(cell.removeprefix(">")) for cell in column) for column in zip(columns, *rows, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        at = columns.index(name)
        columns, *rows = ((*line[:at], *line[at + 1 :]) for line in (columns, *rows))
    return columns, rows


def _visible(text: str) -> str:
    """Return the text that a terminal would show of a line with carriage returns."""
    return terminal.printable(text.rstrip("\r").rpartition("\r")[2])
