"""atoll trace: a job's events as spans, for OpenTelemetry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.daemons import need
from atoll.cli.commands.jobs import JobName
from atoll.cli.commands.streams import Follow
from atoll.cli.render import terminal
from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.client.client import AsyncClient
    from atoll.v1.common_pb2 import Event
    from atoll.v1.jobs_pb2 import Job


def trace(
    context: typer.Context,
    job: JobName,
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The collector's, without /v1/traces. Else as OTEL_EXPORTER_OTLP_ENDPOINT and its like say.",
            show_default="http://localhost:4318",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write OTLP JSON there; send nothing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="OTLP JSON on stdout; send nothing.")] = False,
    follow: Follow = False,
) -> None:
    """Send what happened to a job to an OpenTelemetry collector, as a trace from its submit to its end.

    It is made of the job's events, so it costs the training nothing; sent again it is the same trace.

    atoll trace vit-3f9a --endpoint http://localhost:4318
    """
    if sum((endpoint is not None, output is not None, as_json)) > 1:
        raise BadInput("--endpoint, --output and --json exclude each other. Choose one")
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise BadInput(f"--output {output} is no file in a folder that is there")
    otlp = need("atoll.cli.traces.otlp", "otel")
    url = otlp.traces_url(endpoint) if output is None and not as_json else ""

    async def recorded(client: AsyncClient) -> tuple[Job, list[Event]]:
        found = await client.get(job)
        return found, [event async for event in client.events(found.id, follow=follow)]

    found, events = connection.of(context).run(recorded)
    from atoll.cli.traces.spans import spans_of, trace_id

    spans = spans_of(found, events)
    over = [span for span in spans if span.end_unix_s is not None]
    told = f"{len(over)} spans of {found.id}, trace {trace_id(found):032x}"
    if as_json:
        terminal.print_json(otlp.as_otlp_json(found, over))
    elif output is not None:
        _write(output, json.dumps(otlp.as_otlp_json(found, over)))
        print(f"{output}: {told}")
    else:
        otlp.send(found, over, url)
        print(f"{url}: {told}")
    if left := [span.name for span in spans if span.end_unix_s is None]:
        terminal.note(f"not over, so left out: {', '.join(left)}. The same command adds them later, or --follow")


def _write(path: Path, line: str) -> None:
    try:
        path.write_text(f"{line}\n")
    except OSError as error:
        raise BadInput(f"--output {path}: {error.strerror}. Name a file that you may write") from error
