"""atoll doctor, install-etcd, version: this machine and its installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.cluster import connection
from atoll.cli.commands.options import Json
from atoll.cli.render import terminal
from atoll.cli.render.help import option
from atoll.errors import BadInput


def doctor(
    context: typer.Context,
    data_dir: Annotated[Path, option("DIR", "Check the disk of this folder.")] = Path("~/.atoll"),
    as_json: Json = False,
) -> None:
    """Check this machine and the cluster, and say what to fix.

    The exit code is 1 if something is broken.
    """
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
        Path | None, typer.Argument(metavar="FILE.deb", help="Package of Debian, for a machine that reaches no mirror.")
    ] = None,
) -> None:
    """Install an etcd that keeps its data: Debian's, checked by its digest.

    A controller without --etcd starts it, unless a newer one is on PATH.
    """
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
