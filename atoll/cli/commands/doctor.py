"""atoll doctor, install-etcd, version: this machine and its installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.options import Json
from atoll.cli.render import terminal
from atoll.errors import BadInput


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


def install_etcd(
    package: Annotated[
        Path | None, typer.Argument(metavar="FILE.deb", help="The package, where this machine reaches no mirror.")
    ] = None,
) -> None:
    """Put an etcd that keeps its data beside Atoll: the binary of Debian's package, checked by its digest.

    Controllers without --etcd start it, unless a newer one is on PATH."""
    from atoll.controller.state import etcd_binary
    from atoll.controller.state.etcd_binary import INSTALLED

    if package is None:
        terminal.note(f"fetching etcd {etcd_binary.PACKAGE_VERSION} from Debian: 12 MB")
        content = etcd_binary.fetch_package()
    else:
        try:
            content = package.expanduser().read_bytes()
        except OSError as error:
            raise BadInput(f"{package} cannot be read: {error.strerror}. Check the path") from error
        etcd_binary.check_package(content, str(package))
    print(etcd_binary.install(content, INSTALLED))


def version(as_json: Json = False) -> None:
    """Print Atoll's version."""
    from importlib.metadata import version as installed

    if as_json:
        terminal.print_json({"version": installed("atoll")})
    else:
        print(installed("atoll"))
