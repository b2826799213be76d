"""The bar of a followed job on a terminal: how much of its epochs is behind it, and for how long it will go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from atoll.cli.render import terminal, views, wire

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.jobs_pb2 import Job


def bar(job: Job) -> Any:
    """A rich renderable; None where the script has not said for how many epochs it trains.

    The time that is left is the controller's estimate: a bar's own would begin anew with each look.
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


class BarBelow:
    """Lines scroll by above, the job's bar and figures stay below them. Used with `with`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    async def while_shown(self, client: AsyncClient, job: str, shown: Coroutine[Any, Any, None]) -> None:
        """Shows the job below until `shown` has ended, or raises what that raises."""
        watching = asyncio.create_task(self._watch(client, job), name=f"state of {job}")
        try:
            await shown
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)  # the cluster is the same: its output says why

    async def _watch(self, client: AsyncClient, job: str) -> None:
        async with aclosing(client.watch(job)) as changes:
            async for one in changes:
                self.job(one)

    def line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    def job(self, job: Job) -> None:
        from rich.console import Group
        from rich.text import Text

        head = f"{job.id} {wire.phase(job)}"
        below = Text(f"{head}  {views.figures(job)}" if job.progress.step else head, "dim", no_wrap=True)
        self._live.update(Group(*filter(None, (bar(job), below))))
