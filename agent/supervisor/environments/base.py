"""The agent's packages under an environment of a job: found after the job's own, and counted as installed."""

from __future__ import annotations

import hashlib
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SITE: Final = ("site-packages", "dist-packages")
_PATH_FILE: Final = "_atoll_agent.pth"
_INSTALLER: Final = "atoll-agent"


def site_folders() -> list[Path]:
    """Where this interpreter has its packages."""
    return [Path(entry) for entry in sys.path if Path(entry).name in _SITE and Path(entry).is_dir()]


def digest() -> str:
    """Of this interpreter and the packages that it has now."""
    installed = sorted(found.name for folder in site_folders() for found in folder.glob("*.dist-info"))
    return hashlib.sha256("\n".join([sys.version, sys.prefix, *installed]).encode()).hexdigest()


def lay_under(venv: Path) -> None:
    """Have the environment's interpreter look here for what it has not got itself, also through what these folders say
    of others, as where a package is worked on."""
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in site_folders()]
    (_packages(venv) / _PATH_FILE).write_text("".join(lines))


@contextmanager
def seen_by_installers(venv: Path) -> Iterator[None]:
    """Name the agent's packages in the environment meanwhile: an installer that looks nowhere else (uv) would install
    torch once more. What it replaces it takes away itself; the rest is taken away here."""
    packages = _packages(venv)
    for folder in reversed(site_folders()):  # the first one counts
        for found in folder.glob("*.dist-info"):
            if (found / "METADATA").is_file():
                _name(packages / found.name, found / "METADATA")
    try:
        yield
    finally:
        for named in packages.glob("*.dist-info"):
            installer = named / "INSTALLER"
            if installer.is_file() and installer.read_text() == _INSTALLER:
                shutil.rmtree(named)


def _name(folder: Path, metadata: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(metadata, folder / "METADATA")
    (folder / "INSTALLER").write_text(_INSTALLER)
    files = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in files))


def _packages(venv: Path) -> Path:
    paths = sysconfig.get_paths(scheme="venv", vars={"base": str(venv), "platbase": str(venv)})
    return Path(paths["purelib"])
