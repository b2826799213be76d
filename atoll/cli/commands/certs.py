"""atoll certs: the cluster's own certificate authority."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.render import terminal
from atoll.cli.render.help import TidyCommand, TidyGroup, option
from atoll.errors import BadInput

if TYPE_CHECKING:
    from atoll.security.certificates import Role

app = typer.Typer(cls=TidyGroup, help="Make the certificates and the join token of a cluster.")

_command = app.command(cls=TidyCommand)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the authority. Keep the file ca-key.pem in it safe.")
]


@_command
def init(folder: Folder) -> None:
    """Make the authority (10 years) and the token that agents join with."""
    from atoll.security import certificates

    certificates.create_authority(folder.expanduser(), _now())
    print(folder)
    terminal.note(
        f"next: atoll certs server {folder} --host HEAD, atoll certs agent {folder} NODE for each machine, "
        f"atoll certs client {folder} NAME. {folder}/join-token is the TOKEN of controllers and agents"
    )


@_command
def server(
    folder: Folder,
    host: Annotated[list[str], option("HOST", "Certify this name or address of the controller; repeatable.")],
) -> None:
    """Make a controller's certificate (1 year) for all the given hosts."""
    if not host:
        raise BadInput("--host missing: name what clients and agents dial, e.g. --host 10.0.0.1")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", host[0]).strip("-._") or "head"
    _issue(folder, "controller", name[:50], host, "atoll controller --listen HOST:PORT --token-file TOKEN")


@_command
def client(
    folder: Folder, name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user who will submit jobs.")]
) -> None:
    """Make a user's certificate (1 year); its holder may run code on every node."""
    _issue(folder, "client", name, [], "atoll --controller HOST:PORT jobs")


@_command
def agent(folder: Folder, node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]) -> None:
    """Make a node's certificate (1 year); to join, a node needs the token file too."""
    _issue(folder, "agent", node, [], f"atoll agent --name {node} --token-file TOKEN --controller HOST:PORT")


@_command
def volunteer(folder: Folder, node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]) -> None:
    """Make a volunteer's certificate (1 year) and join token; with them a node can only help."""
    from atoll.security import certificates

    own = certificates.issue_volunteer(folder.expanduser(), node, _now())
    print(own)
    terminal.note(
        f"next: copy {own} to its machine, then ATOLL_TLS_DIR={own} atoll agent --volunteer --name {node} "
        f"--token-file {own}/token --controller HOST:PORT"
    )


@_command
def revoke(
    folder: Folder,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the certificate's folder, e.g. client-alice or agent-node7.")
    ],
) -> None:
    """Revoke all certificates made so far for a name, and cut their holders off."""
    from atoll.security import certificates

    listed, added = certificates.revoke(folder.expanduser(), name, _now())
    print(listed)
    terminal.note(
        f"{added} more revoked. next: copy {listed} to each controller, beside its ca.pem; it is read within a second"
    )


def _issue(folder: Path, role: Role, name: str, hosts: list[str], command: str) -> None:
    from atoll.security import certificates

    own = certificates.issue(folder.expanduser(), role, name, hosts, _now())
    print(own)
    terminal.note(f"next: copy {own} to its machine, then ATOLL_TLS_DIR={own} {command}")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
