"""atoll doctor: what is wrong with this machine or this cluster, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.jobs import Json


def doctor(
    context: typer.Context,
    data_dir: Annotated[Path, typer.Option(help="The folder whose disk is looked at.")] = Path("~/.atoll"),
    as_json: Json = False,
) -> None:
    """Look at this machine and at the cluster; say what is wrong and what to do. Exit code 1 if something is broken."""
    from atoll.cli.checks.cluster import check_certificates, check_cluster
    from atoll.cli.checks.machine import check_machine
    from atoll.cli.render.findings import show

    reached = connection.of(context)
    findings = [*check_machine(data_dir.expanduser().absolute()), *check_certificates(reached), *check_cluster(reached)]
    show(findings, as_json=as_json)
    if any(finding.verdict == "broken" for finding in findings):
        raise typer.Exit(1)
