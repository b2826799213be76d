"""atoll resume: `atoll restore` of a job that ended before it was done, with all that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from atoll.checkpoints.sources import CheckpointSource
from atoll.cli.commands import job_options as options
from atoll.cli.commands import restore, submit
from atoll.cli.commands.jobs import JobName
from atoll.cli.render import wire
from atoll.errors import Conflict

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient


def resume(
    context: typer.Context,
    job: JobName,
    follow: options.Follow = False,
    timeout: options.Timeout = None,
    as_json: options.AsJson = False,
) -> None:
    """Go on with a cancelled or failed job, as a new one, from its newest checkpoint.

    With other settings, or from another step: atoll restore.
    """
    again = restore.of_job(CheckpointSource(job=job), {})

    async def send(client: AsyncClient) -> str:
        found = await client.get(job)
        if (phase := wire.phase(found)) not in ("cancelled", "failed"):
            other = f"`atoll restore {found.id}` begins another one with its checkpoint"
            raise Conflict(f"job {found.id} is {phase}; only what was cancelled or failed is resumed. {other}")
        return await again(client)

    submit.hand_over(context, send, follow, timeout, as_json=as_json)
