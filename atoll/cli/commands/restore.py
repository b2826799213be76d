"""atoll restore."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.checkpoints import sources
from atoll.cli.commands import job_options as options
from atoll.cli.commands import submit
from atoll.cli.commands.checkpoints import SourceName, StepNumber
from atoll.cli.render import terminal
from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.common_pb2 import StartFrom
    from atoll.v1.jobs_pb2 import CheckpointsReply, Job


def restore(
    context: typer.Context,
    source: SourceName,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Handed to the script.")] = None,
    *,
    step: StepNumber = None,
    script: Annotated[
        Path | None, typer.Option(help="Another script than the job's; needed for a directory or a URL.")
    ] = None,
    config: options.Config = None,
    follow: options.Follow = False,
    timeout: options.Timeout = None,
    as_json: options.AsJson = False,
) -> None:
    """Start a new job from a checkpoint, which stays as it is.

    atoll restore vit-3f9a --step 4000        the same code and settings, unless others are given

    atoll restore s3://bucket/vit/vit-3f9a --script train.py --workers 4
    """
    wanted = sources.parse(source, step)
    flags = options.flags(context)
    own_code = script is not None or "module" in flags or config is not None
    if not wanted.job and not own_code:
        raise BadInput(f"{source} says nothing of the code. Give it with --script train.py, or with --config")
    send = of_job(wanted, flags) if not own_code else _with_own_code(wanted, config, flags)
    submit.hand_over(context, send, follow, timeout, as_json=as_json)


def of_job(wanted: sources.CheckpointSource, flags: dict[str, Any]) -> submit.Send:
    """Return how to submit a job from another job's checkpoint, with its code and settings but for the flags."""
    from atoll.client import job_file

    async def send(client: AsyncClient) -> str:
        job, start = await _start(client, wanted)
        spec = submit.with_flags(job_file.from_spec(job.spec), flags).to_spec(job.spec.script, os.environ)
        spec.checkpoint.start_from.CopyFrom(start)
        return await client.submit_alike(spec, job.id)

    return send


def _with_own_code(wanted: sources.CheckpointSource, config: Path | None, flags: dict[str, Any]) -> submit.Send:
    from atoll.v1.common_pb2 import StartFrom

    spec, bundle = submit.prepare(config, flags)
    if wanted.directory is not None:
        sources.check_directory(wanted.directory, wanted.step, terminal.note)
    elif wanted.url:
        sources.check_store(wanted.url, wanted.step, terminal.note)

    async def send(client: AsyncClient) -> str:
        if wanted.job:
            _, start = await _start(client, wanted)
        else:
            start = StartFrom(directory=wanted.url or str(wanted.directory), step=wanted.step)
        spec.checkpoint.start_from.CopyFrom(start)
        return await client.submit(spec, bundle.data)

    return send


async def _start(client: AsyncClient, wanted: sources.CheckpointSource) -> tuple[Job, StartFrom]:
    """Return the job and its checkpoint. Raises NotFound, CheckpointError."""
    from atoll.v1.common_pb2 import StartFrom

    job = await client.get(wanted.job)
    reply = await client.checkpoints(job.id)
    _say_where(reply, wanted.step)
    return job, StartFrom(job=job.id, directory=job.spec.checkpoint.directory, step=wanted.step)


def _say_where(reply: CheckpointsReply, step: int | None) -> None:
    found = sources.chosen(reply, step)[0]
    where = found.path if found.tier == "store" else f"node {', '.join(found.nodes)}"
    terminal.note(f"from step {found.step} of {reply.job}, on {where}")
