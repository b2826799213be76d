"""Tells an open page what changes, as server-sent events: the cluster, and the job that it looks at."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from atoll.dashboard import pages
from atoll.errors import AtollError

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient

REFRESH_S: Final = 1.0
KEEP_ALIVE_S: Final = 10.0
"""A silent connection is ended by proxies; a comment keeps it."""
AGAIN_S: Final = 1.0
_QUEUED: Final = 256
"""Messages of one page that wait for its browser; whoever fills it waits."""


class ClusterFeed:
    """The cluster's state, asked for once a second however many pages are open, and by nobody while none is."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._newest: dict[str, Any] = {}
        self._asked = asyncio.Lock()
        self._asked_s = float("-inf")

    async def newest(self) -> dict[str, Any]:
        """Return the state, at most a second old. Raises AtollError if no controller answers."""
        async with self._asked:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._asked_s >= REFRESH_S:
                jobs, nodes = await asyncio.gather(self._client.jobs(ended=True), self._client.nodes())
                self._newest, self._asked_s = pages.cluster(jobs, nodes), asyncio.get_running_loop().time()
            return self._newest


async def messages(client: AsyncClient, feed: ClusterFeed, job: str) -> AsyncGenerator[str, None]:
    """Server-sent events of one page until it goes away.

    `cluster` (pages.cluster), with `job` also `job` (pages.job) after every change; `trouble` with the reason where
    the cluster cannot be asked, and with an empty one when it can again. Only what changed is sent.
    """
    waiting: asyncio.Queue[str] = asyncio.Queue(_QUEUED)

    async def say(kind: str, data: Any) -> None:
        await waiting.put(f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n")

    async def told(work: Callable[[], Awaitable[None]]) -> None:
        """Do the work again and again, saying what is in its way."""
        while True:
            try:
                await work()
            except AtollError as error:
                await say("trouble", str(error))
            await asyncio.sleep(AGAIN_S)

    last: dict[str, Any] = {}

    async def cluster() -> None:
        nonlocal last
        while True:
            newest = await feed.newest()
            if newest != last:
                last = newest
                await say("trouble", "")
                await say("cluster", newest)
            await asyncio.sleep(REFRESH_S)

    async def one_job() -> None:
        async with aclosing(client.watch(job)) as changes:
            async for found in changes:
                await say("trouble", "")
                await say("job", pages.job(found, time.time()))
        await asyncio.Event().wait()  # it has ended: nothing more will be said of it

    tasks = [asyncio.create_task(told(cluster), name="dashboard: cluster")]
    if job:
        tasks.append(asyncio.create_task(told(one_job), name=f"dashboard: {job}"))
    try:
        while True:
            try:
                yield await asyncio.wait_for(waiting.get(), KEEP_ALIVE_S)
            except TimeoutError:
                yield ": still here\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
