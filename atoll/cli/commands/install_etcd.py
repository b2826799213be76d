"""atoll install-etcd."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.render import terminal
from atoll.errors import BadInput


def install_etcd(
    package: Annotated[
        Path | None, typer.Argument(metavar="FILE.deb", help="The package, where this machine reaches no mirror.")
    ] = None,
) -> None:
    """Put an etcd that keeps its data beside Atoll: the binary of Debian's package, checked by its digest.

    Controllers without --etcd start it, unless a newer one is on PATH."""
    from atoll.controller.state import etcd_package
    from atoll.controller.state.etcd_binary import INSTALLED

    if package is None:
        terminal.note(f"fetching etcd {etcd_package.VERSION} from Debian: 12 MB")
        content = etcd_package.fetch_package()
    else:
        try:
            content = package.expanduser().read_bytes()
        except OSError as error:
            raise BadInput(f"{package} cannot be read: {error.strerror}. Check the path") from error
        etcd_package.check_package(content, str(package))
    print(etcd_package.install(content, INSTALLED))
