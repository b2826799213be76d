"""An etcd that keeps its data, for machines that have none: the binary of Debian's package, known by its digest."""

from __future__ import annotations

import hashlib
import io
import os
import platform
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll.controller.state.etcd_binary import EtcdBinary, ask_version
from atoll.errors import BadInput, StoreUnavailable

VERSION: Final = "3.5.30-2"
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
_ANSWER_S: Final = 20.0
_AR_MAGIC: Final = b"!<arch>\n"
_AR_HEADER_BYTES: Final = 60


def fetch_package(mirrors: Sequence[str] = MIRRORS) -> bytes:
    """The package for this machine, from the first mirror that has it as it should be. Raises BadInput on a machine
    that there is none for, StoreUnavailable naming what each mirror said."""
    architecture, _ = _package()
    failed = []
    for mirror in mirrors:
        url = f"{mirror}/etcd-server_{VERSION}_{architecture}.deb"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as reply:
                package: bytes = reply.read(_MAX_BYTES)
            check_package(package, url)
            return package
        except (OSError, BadInput) as error:
            failed.append(f"{url}: {error}")
    raise StoreUnavailable(
        f"etcd {VERSION} could not be fetched: {'; '.join(failed)}. Give the package's file, or put etcd 3.5.20 or "
        "newer on PATH"
    )


def check_package(package: bytes, source: str) -> None:
    """Raises BadInput where it is not the package for this machine, bit by bit."""
    _, sha256 = _package()
    found = hashlib.sha256(package).hexdigest()
    if found != sha256:
        raise BadInput(f"{source} is not Debian's etcd-server {VERSION}: its SHA-256 is {found}, not {sha256}")


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
