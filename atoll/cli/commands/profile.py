"""atoll profile: measures once per model how compression and the total batch change its convergence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.cli.commands.daemons import need
from atoll.cli.commands.options import Json, batch_range
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import BadInput, NotFound
from atoll.errors.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from atoll.client.job_file import JobFile
    from atoll.profiling.document import Document
    from atoll.profiling.profiler import ProfileRequest
    from atoll.profiling.trials import Command

MAX_WORKERS: Final = 64


def profile(
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="Training script. Its own arguments follow after `--`.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    *,
    out: Annotated[
        Path | None, option("FILE", "Write the profile to this file.", show_default="SCRIPT.profile.json")
    ] = None,
    probes: Annotated[int, option("N", "Run N trials with compression and staleness.")] = 30,
    samples: Annotated[
        int | None, option("N", "Train N samples in each trial.", show_default="half the dataset")
    ] = None,
    batch: Annotated[
        str | None, option("MIN:MAX", "Try total batches in this range.", show_default="the script's / 4 to * 4")
    ] = None,
    workers: Annotated[int, option("N", "Train each trial with N processes on this machine.")] = 2,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Draw sparsities uniformly from 0 to 0.999, as published.")
    ] = False,
    config: Annotated[
        Path | None, option("FILE", "Read script, args, env, seed and settings from this job file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how compression and the total batch change a model's convergence.

    atoll profile train.py --probes 30 -- --lr 0.1

    The command runs the script many times on this machine. After an interruption, the same command continues.
    """
    from atoll.profiling import document as documents
    from atoll.profiling.profiler import ProfileRequest

    if not 1 <= probes <= documents.MAX_PROBES:
        raise BadInput(f"--probes {probes} must be 1 to {documents.MAX_PROBES}. 30 are usually enough")
    if not 2 <= workers <= MAX_WORKERS:
        raise BadInput(f"--workers {workers} must be 2 to {MAX_WORKERS}: one alone exchanges nothing")
    if samples is not None and samples < 1:
        raise BadInput(f"--samples {samples} must be at least 1. Leave it out for half the dataset")
    wanted_batches = batch_range("--batch", batch)
    need("skopt", "profile")
    job = _job(config, script, args)
    path = out if out is not None else Path(f"{Path(str(job.script)).stem}.profile.json")
    _check_devices(workers)
    wanted = ProfileRequest(
        probes=probes,
        workers=workers,
        sampling="uniform" if uniform else "log-uniform",
        seed=job.seed,
        settings=_own_settings(job),
        learning_rate=job.adapt.learning_rate,
        samples=samples,
        batches=wanted_batches,
    )
    command = _command(job, path)
    document = _begin(command, wanted, path)
    document = _run(document, path, command)
    if as_json:
        terminal.print_json(document.model_dump(mode="json"))
    else:
        _show(document)
    terminal.note(f'profile: {path}   in a job file: [adapt] profile = "{path}"')


def _job(config: Path | None, script: Path | None, args: list[str] | None) -> JobFile:
    """Return a job file's settings with the command's on top; `script` is set, relative to this folder."""
    from atoll.client import job_file

    job = job_file.load(config) if config else job_file.JobFile()
    chosen = script or (config.parent / job.script if config and job.script else None)
    if chosen is None:
        raise BadInput("no script named. Give it: atoll profile train.py, or `script = ` in the job file")
    if not chosen.exists():
        raise NotFound(f"script {chosen} is not there. Check the path")
    if not chosen.is_file():
        raise BadInput(f"script {chosen} is no file. Name the Python file")
    return job.model_copy(update={"script": str(chosen), **({"args": tuple(args)} if args else {})})


def _own_settings(job: JobFile) -> dict[str, Any]:
    """Return the job's settings of the profiled strategy that a trial does not choose."""
    from atoll.strategies import registry

    strategy = registry.profiled()
    settings = job.settings_of(strategy.name)
    given = settings.model_dump(exclude_unset=True) if settings is not None else {}
    return {name: value for name, value in given.items() if name not in {"sparsity", *strategy.trial_settings}}


def _command(job: JobFile, path: Path) -> Command:
    from atoll.profiling.trials import Command

    assert job.script is not None  # `_job` saw to it
    logs = path.with_suffix(".logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"folder {logs} for logs cannot be made: {error.strerror}. Name another --out") from error
    return Command(script=Path(job.script), args=job.args, env=job.env, logs=logs)


def _check_devices(workers: int) -> None:
    from atoll.agent.telemetry.devices import find_devices

    gpus = [device for device in find_devices() if device.kind == "cuda"]
    if 0 < len(gpus) < workers:
        raise BadInput(
            f"--workers {workers}, but this machine has {len(gpus)} GPU(s), and a GPU can be of one worker only. Give "
            "fewer, or train on the CPU: CUDA_VISIBLE_DEVICES= atoll profile ..."
        )


def _begin(command: Command, wanted: ProfileRequest, path: Path) -> Document:
    """Return the profile on disk, or an empty one. Raises BadInput where the one on disk is of something else."""
    from atoll.profiling import profiler
    from atoll.profiling.document import read

    old = read(path) if path.exists() else None  # a file that is no profile is refused before anything is started
    terminal.note(f"starting {command.script} to see what it trains")
    new = profiler.new_profile(profiler.prepared_by(command, wanted.workers), command, wanted)
    if old is None:
        return new
    document = profiler.resumed(old, new, path)
    if old.conditions.script_sha256 != new.conditions.script_sha256:
        terminal.note(f"warning: {command.script} was changed since {path} was begun; what it prepares is the same")
    going_on = "nothing is left to do" if document.complete else "going on"
    terminal.note(f"{path} has {len(document.probes)} of {document.wanted_probes} probes; {going_on}")
    return document


def _run(document: Document, path: Path, command: Command) -> Document:
    from atoll.cli.render.trial_progress import shown
    from atoll.profiling import profiler
    from atoll.profiling.document import write
    from atoll.profiling.trials import ScriptFailed

    if document.complete:
        return document
    try:
        with shown(document) as display:
            tried = document
            for tried, made in profiler.run_trials(document, path, command, display.stepped):
                display.ended(tried, made)
        done = profiler.finished(tried)
        write(done, path)
        return done
    except ScriptFailed as error:
        for line in error.last_lines:
            terminal.note(f"  | {terminal.printable(line)}")
        raise
    except KeyboardInterrupt:
        terminal.note(f"interrupted. The same command goes on where it stopped: {path}")
        raise typer.Exit(INTERRUPTED) from None


def _show(document: Document) -> None:
    """Print the extra loss in percent: sparsities down, batches across."""
    grid, compression = document.surrogate, document.compression
    assert grid is not None
    assert compression is not None
    columns = [">SPARSITY", *(f">{batch:.0f}" for batch in grid.batches)]
    rows = [
        [f"{sparsity:g}", *(f"{100 * alone:+.1f} ({100 * whole:+.0f})" for alone, whole in zip(one, both, strict=True))]
        for sparsity, one, both in zip(grid.sparsities, compression.extra, grid.extra, strict=True)
    ]
    print(
        "extra loss in %, by sparsity and total batch: against no compression at the same batch (and at batch "
        f"{document.reference_batch})"
    )
    terminal.print_table(columns, rows)
    sys.stdout.flush()
