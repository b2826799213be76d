"""atoll checkpoints, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.checkpoints import sources
from atoll.cli.cluster import connection
from atoll.cli.commands.options import JobName, Json, SourceName, StepNumber
from atoll.cli.render import terminal, wire
from atoll.cli.render.help import option
from atoll.errors import BadInput, CheckpointError, NotFound

if TYPE_CHECKING:
    from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
    from atoll.v1.jobs_pb2 import CheckpointsReply


def checkpoints(context: typer.Context, job: JobName, as_json: Json = False) -> None:
    """List a job's checkpoints, and whether they are complete and sound."""
    reply = connection.of(context).run(lambda client: client.checkpoints(job))
    if as_json:
        terminal.print_json(wire.to_plain(reply))
        return
    from atoll.cli.render import views

    if reply.checkpoints:
        rows = [views.checkpoint_row(found) for found in reply.checkpoints]
        terminal.print_table(views.CHECKPOINT_COLUMNS, rows)
    else:
        terminal.note(f"no checkpoint of {reply.job} was found")
    for note in [*dict.fromkeys(found.trouble for found in reply.checkpoints if found.trouble), *reply.notes]:
        terminal.note(terminal.printable(note))


def export(
    context: typer.Context,
    source: SourceName,
    output: Annotated[Path, option("FILE", "Write to this file, whole or not at all.", "--output", "-o")],
    *,
    step: StepNumber = None,
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="Write the safetensors format, in place of what torch.load reads.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Write the model of a checkpoint as a plain PyTorch state dict.

    atoll export vit-3f9a -o model.pt        then: model.load_state_dict(torch.load("model.pt", weights_only=True))
    """
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"--output {output} is no file in a folder that is there")
    try:
        from atoll.checkpoints import export as exporting
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "xxhash"):
            raise
        raise BadInput(f"export needs {error.name}, which is not installed: pip install 'atoll[train]'") from error
    wanted = sources.parse(source, step)
    if wanted.job:
        reply = connection.of(context).run(lambda client: client.checkpoints(wanted.job))
        checkpoint = _of_job(reply, wanted.step)
    else:
        checkpoint = exporting.load(wanted.directory, wanted.url, wanted.step, terminal.note)
    left_out = exporting.write(checkpoint, output, safetensors=safetensors)
    header = checkpoint.header
    if as_json:
        terminal.print_json({"file": str(output), "job": header.job, "run": header.run, "step": header.step})
    else:
        print(f"{output}: the model of {header.job}, step {header.step}")
    if left_out:
        terminal.note(f"left out, as they are no tensors: {', '.join(left_out[:8])}")


def _of_job(reply: CheckpointsReply, step: int | None) -> LoadedCheckpoint:
    """Load from this machine's disk or the store, whichever is newer. Raises NotFound naming the node that has the
    checkpoint."""
    from atoll.checkpoints import export as exporting

    meant = sources.chosen(reply, step)
    trouble: CheckpointError | None = None
    for found in meant:
        folder = found.path.rpartition("/")[0]
        try:
            if found.tier == "store":
                return exporting.load(None, folder, found.step, terminal.note)
            if (Path(found.path) / "manifest.json").is_file() and exporting.is_of(Path(found.path), reply.job):
                return exporting.load(Path(folder), "", found.step, terminal.note)
        except CheckpointError as error:
            trouble = trouble or error
    if trouble is not None:
        raise trouble
    first = meant[0]
    raise NotFound(
        f"the checkpoint of step {first.step} of {reply.job} is not on this machine but on node "
        f"{', '.join(first.nodes)}. Run there: atoll export {first.path} -o FILE"
    )
