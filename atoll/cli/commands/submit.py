"""atoll submit, restore, resume: start a job from a script, or from a checkpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from atoll.checkpoints import sources
from atoll.cli.cluster import connection
from atoll.cli.commands import options
from atoll.cli.render import shortage, terminal, wire
from atoll.cli.render.help import option
from atoll.errors import AtollError, BadInput, Conflict
from atoll.errors.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.client.job_file import JobFile
    from atoll.jobs.code_bundle import Bundle
    from atoll.v1.common_pb2 import JobSpec, StartFrom
    from atoll.v1.jobs_pb2 import CheckpointsReply, Job

Send: TypeAlias = "Callable[[AsyncClient], Awaitable[str]]"
"""Submits a job and returns its id."""


def submit(
    context: typer.Context,
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Training script. Its own arguments follow after `--`.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    *,
    config: options.Config = None,
    follow: options.Follow = False,
    follow_for: options.FollowFor = None,
    as_json: options.AsJson = False,
) -> None:
    """Submit a training script to the cluster.

    atoll submit train.py --workers 2:8 --follow -- --lr 0.1

    atoll submit -m package.train --workers 4 -- --lr 0.1

    Every node that trains the job runs this code.
    """
    spec, bundle = prepare(config, flags_of(context, script, args))
    hand_over(context, lambda client: client.submit(spec, bundle.data), follow, follow_for, as_json=as_json)


def flags_of(context: typer.Context, script: str | None, args: list[str] | None) -> dict[str, Any]:
    """Return the fields of the job that the command sets. Behind `-m` or `--`, the first word is the script's own."""
    flags = options.flags(context)
    if script is not None and ("module" in flags or script.startswith("-")):
        flags |= {"script": None, "args": (script, *(args or ()))}
    return flags


def hand_over(
    context: typer.Context,
    send: Send,
    follow: bool,
    follow_for_s: float | None,
    *,
    as_json: bool,
) -> None:
    """Submit a job, print its id, and follow it if asked to. send: submits and returns the id."""
    if follow_for_s is not None and not follow_for_s > 0:
        raise BadInput(f"--follow-for {follow_for_s:g} must be positive. Leave it out to follow to the end")
    if follow_for_s is not None and not follow:
        raise BadInput(f"--follow-for {follow_for_s:g} without --follow does nothing. Add --follow, or leave it out")
    try:
        connection.of(context).run(
            lambda client: submit_and_follow(client, send, follow=follow, follow_for_s=follow_for_s, as_json=as_json)
        )
    except Detached as detached:
        raise left_alone(detached) from None


def left_alone(detached: Detached) -> typer.Exit:
    """Print that a job goes on without this command, and how to see and end it; return the command's end."""
    terminal.note(f"detached: {detached} goes on. See it: atoll status {detached}   end it: atoll cancel {detached}")
    return typer.Exit(INTERRUPTED)


def prepare(config: Path | None, flags: dict[str, Any]) -> tuple[JobSpec, Bundle]:
    """Read job file, flags and code. Finds everything that can be wrong with the input, before any connection."""
    from atoll.client import job_file, submission

    job = job_file.load(config) if config else job_file.JobFile()
    base = config.parent if config and not (flags.get("script") or flags.get("module")) else Path()
    root = config.parent if config and "workdir" not in flags else Path()
    return submission.prepared(with_flags(job, flags), base, root)


def with_flags(job: JobFile, flags: dict[str, Any]) -> JobFile:
    """Return the job with the command's flags on top; --env and --secret add to what it has. Raises BadInput."""
    from atoll.client import job_file

    env = _environment(flags.get("env", ()))
    secrets = tuple(dict.fromkeys([*job.secrets, *flags.get("secrets", ())]))
    return job_file.with_flags(job, {**flags, "env": {**job.env, **env} if env else None, "secrets": secrets or None})


def _environment(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise BadInput(f"--env {pair!r} is not NAME=VALUE. Write it like --env EPOCHS=3")
        found[key] = value
    return found


class Detached(Exception):
    """Ctrl-C while following; its text is the job's id."""


async def submit_and_follow(
    client: AsyncClient,
    send: Send,
    *,
    follow: bool = True,
    follow_for_s: float | None = None,
    as_json: bool = False,
    on_ctrl_c: str = "Ctrl-C detaches; the job goes on",
) -> None:
    """Submit a job, print its id and what it lacks, and follow it to its end if asked to.

    on_ctrl_c: the words of the live view. Raises Detached, JobFailed, JobCancelled, DeadlineExceeded."""
    job_id = await send(client)
    if as_json:
        terminal.print_json({"job": job_id})
    else:
        print(job_id, flush=True)
        with suppress(AtollError):  # the job is submitted, whatever becomes of this question
            job, nodes = await client.get(job_id), await client.nodes()
            if line := shortage.missing_devices(job, nodes.nodes):
                terminal.note(line)
    if not follow:
        terminal.note(f"follow it: atoll logs {job_id} -f    see it: atoll status {job_id}")
        return
    await follow_to_its_end(client, job_id, follow_for_s, as_json=as_json, on_ctrl_c=on_ctrl_c)


async def follow_to_its_end(
    client: AsyncClient, job_id: str, follow_for_s: float | None, *, as_json: bool, on_ctrl_c: str
) -> None:
    """Follow a job, then print how it ended. Raises as `submit_and_follow` does."""
    try:
        last = await _shown(client, job_id, follow_for_s, as_json, on_ctrl_c)
    except asyncio.CancelledError:
        raise Detached(job_id) from None
    from atoll.cli.render.follow import last_words, verdict
    from atoll.v1.jobs_pb2 import PHASE_FAILED

    if last.phase == PHASE_FAILED:
        for line in await last_words(client, last):
            terminal.note(f"  | {terminal.printable(line)}")
    verdict(last)


async def _shown(client: AsyncClient, job_id: str, follow_for_s: float | None, as_json: bool, on_ctrl_c: str) -> Job:
    from atoll.cli.render import follow

    if as_json:
        return await follow.follow(client, job_id, follow.JsonScreen(), follow_for_s)
    if not terminal.is_watched(sys.stderr):
        return await follow.follow(client, job_id, follow.PlainScreen(), follow_for_s)
    screen = follow.LiveScreen(on_ctrl_c=on_ctrl_c)
    with screen.live:
        return await follow.follow(client, job_id, screen, follow_for_s)


def restore(
    context: typer.Context,
    source: options.SourceName,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    *,
    step: options.StepNumber = None,
    script: Annotated[
        Path | None,
        option(
            "FILE",
            "Run this script in place of the job's; a directory or a URL needs one.",
            rich_help_panel=options.JOB,
        ),
    ] = None,
    config: options.Config = None,
    follow: options.Follow = False,
    follow_for: options.FollowFor = None,
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
    send = _of_job(wanted, flags) if not own_code else _with_own_code(wanted, config, flags)
    hand_over(context, send, follow, follow_for, as_json=as_json)


def _of_job(wanted: sources.CheckpointSource, flags: dict[str, Any]) -> Send:
    """Return how to submit a job from another job's checkpoint, with its code and settings but for the flags."""
    from atoll.client import job_file

    async def send(client: AsyncClient) -> str:
        job, start = await _start(client, wanted)
        spec = with_flags(job_file.from_spec(job.spec), flags).to_spec(job.spec.script, os.environ)
        spec.checkpoint.start_from.CopyFrom(start)
        return await client.submit_alike(spec, job.id)

    return send


def _with_own_code(wanted: sources.CheckpointSource, config: Path | None, flags: dict[str, Any]) -> Send:
    from atoll.v1.common_pb2 import StartFrom

    spec, bundle = prepare(config, flags)
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


def resume(
    context: typer.Context,
    job: options.JobName,
    follow: options.Follow = False,
    follow_for: options.FollowFor = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue a cancelled or failed job as a new job, from its newest checkpoint.

    `atoll restore` does so with other settings or from another step.
    """
    again = _of_job(sources.CheckpointSource(job=job), {})

    async def send(client: AsyncClient) -> str:
        found = await client.get(job)
        if (phase := wire.phase(found)) not in ("cancelled", "failed"):
            other = f"`atoll restore {found.id}` begins another one with its checkpoint"
            raise Conflict(f"job {found.id} is {phase}; only what was cancelled or failed is resumed. {other}")
        return await again(client)

    hand_over(context, send, follow, follow_for, as_json=as_json)
