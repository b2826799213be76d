"""Layer of the agent's packages below a job's environment: found after the job's own, and counted as installed."""

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
    """Return the folders with this interpreter's packages."""
    return [Path(entry) for entry in sys.path if Path(entry).name in _SITE and Path(entry).is_dir()]


def digest() -> str:
    """Return a hash of this interpreter and its installed packages."""
    installed = sorted(found.name for folder in site_folders() for found in folder.glob("*.dist-info"))
    return hashlib.sha256("\n".join([sys.version, sys.prefix, *installed]).encode()).hexdigest()


def lay_under(venv: Path) -> None:
    """Let the environment's interpreter find this interpreter's packages after its own. Path files in these folders are
    followed too, so editable installations work."""
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in site_folders()]
    (_packages(venv) / _PATH_FILE).write_text("".join(lines))


@contextmanager
def seen_by_installers(venv: Path) -> Iterator[None]:
    """List the agent's packages in the environment while an installer runs; else uv, which looks only there, would
    install torch again. The installer removes what it replaces; the rest is removed here."""
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
