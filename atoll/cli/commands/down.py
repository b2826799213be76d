"""atoll down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.cluster import detached
from atoll.cli.cluster.local_cluster import DATA_DIR
from atoll.cli.commands.daemons import need_linux
from atoll.cli.render import terminal


def down(data_dir: Annotated[Path, typer.Option(help="That of the `atoll up`.")] = DATA_DIR) -> None:
    """Stop what `atoll up` started on this machine. Jobs go on with the next `atoll up`. Repeating it is harmless."""
    need_linux()
    data = data_dir.expanduser().absolute()
    if detached.stop(data):
        print("stopped")
    else:
        terminal.note(f"no `atoll up` runs with --data-dir {data}")
