"""A cluster's certificates, made as `atoll certs` makes them."""

from __future__ import annotations

import datetime
from pathlib import Path

from atoll.security.certificates import create_authority, identity, issue

NOW = datetime.datetime.now(datetime.UTC)


class Certificates:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        create_authority(folder, NOW)
        self.controller = identity(issue(folder, "controller", "head", ["127.0.0.1"], NOW))
        self.alice = identity(issue(folder, "client", "alice", [], NOW))
        self.bob = identity(issue(folder, "client", "bob", [], NOW))
        self.a = identity(issue(folder, "agent", "a", [], NOW))
