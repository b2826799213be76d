"""Build a job's environment: a virtual one on top of the agent's, with the job's requirements, then its setup.

FOLDER/venv    the workers' environment
FOLDER/code    a copy of the job's code, if requirements or setup may read it
FOLDER/log     the output of installer and setup
FOLDER/whole   present once the environment is complete"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from atoll.agent.supervisor.processes.environment import SECRET
from atoll.agent.supervisor.processes.exits import last_lines
from atoll.agent.supervisor.processes.leftover_processes import PidFile, end_escaped
from atoll.errors import EnvironmentFailed, NotFound
from atoll.host import die_with_parent
from atoll.jobs.job_spec import ENVIRONMENT_S
from atoll.v1.common_pb2 import JobSpec

MAX_BYTES: Final = 32 << 30
LEAST_FREE_BYTES: Final = 1 << 30
"""Disk space that a build leaves free, for checkpoints and logs."""
QUOTED_LINES: Final = 3
_POLL_S: Final = 0.05
_LOOK_S: Final = 2.0
_OUTPUT_BYTES: Final = 64 * 1024
_WHOLE: Final = "whole"


_FROM_AN_INDEX: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(].*|@\s*(git\+)?https?://.*)?"
)
_ARCHIVE: Final = re.compile(r"[^\s;]+\.(whl|zip|gz|bz2|xz|tar|tgz)")
_OF_THE_INSTALLER: Final = ("PIP_", "UV_")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Inputs of an environment. Jobs with equal recipes share one."""

    requirements: tuple[str, ...]
    setup: str
    code_sha256: str
    """Digest of the job's code if requirements or setup may read it, else empty."""
    installer: Mapping[str, str]
    """The job's variables that configure package indexes."""
    base: str
    """Digest of the agent's interpreter and packages."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def recipe_of(spec: JobSpec, base: str) -> Recipe:
    """base: digest of the agent's interpreter and packages."""
    reads_code = bool(spec.setup) or not all(map(is_from_an_index, spec.requirements))
    return Recipe(
        requirements=tuple(spec.requirements),
        setup=spec.setup,
        code_sha256=spec.code_sha256 if reads_code else "",
        installer={name: value for name, value in sorted(spec.env.items()) if name.startswith(_OF_THE_INSTALLER)},
        base=base,
    )


def is_from_an_index(requirement: str) -> bool:
    """Return True if this requirement certainly names nothing in the job's code."""
    return bool(_FROM_AN_INDEX.fullmatch(requirement)) and not _ARCHIVE.fullmatch(requirement)


_SITE: Final = ("site-packages", "dist-packages")
_PATH_FILE: Final = "_atoll_agent.pth"
_INSTALLER: Final = "atoll-agent"


def site_folders() -> list[Path]:
    """Return the folders with this interpreter's packages."""
    return [Path(entry) for entry in sys.path if Path(entry).name in _SITE and Path(entry).is_dir()]


def agent_digest() -> str:
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
                _list_package(packages / found.name, found / "METADATA")
    try:
        yield
    finally:
        for named in packages.glob("*.dist-info"):
            installer = named / "INSTALLER"
            if installer.is_file() and installer.read_text() == _INSTALLER:
                shutil.rmtree(named)


def _list_package(folder: Path, metadata: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copyfile(metadata, folder / "METADATA")
    (folder / "INSTALLER").write_text(_INSTALLER)
    files = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in files))


def _packages(venv: Path) -> Path:
    paths = sysconfig.get_paths(scheme="venv", vars={"base": str(venv), "platbase": str(venv)})
    return Path(paths["purelib"])


def install_command(python: Path, requirements: Path, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the installer's name and command line. Raises NotFound if there is none."""
    own = Path(sys.executable).parent
    if uv := shutil.which("uv", path=os.pathsep.join((env.get("PATH", os.defpath), str(own)))):
        return "uv pip", [uv, "pip", "install", "--python", str(python), "--requirement", str(requirements)]
    if importlib.util.find_spec("pip") is None:
        raise NotFound("the job has requirements, and its node neither uv nor pip. Install one of them beside atoll")
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return "pip", [str(python), "-m", "pip", "install", *options, "--requirement", str(requirements)]


def is_whole(folder: Path) -> bool:
    return (folder / _WHOLE).exists()


def interpreter(folder: Path) -> Path:
    """Return the environment's Python."""
    return folder / "venv" / "bin" / "python"


def activated(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with the environment's programs first in PATH."""
    venv = folder / "venv"
    path = os.pathsep.join((str(venv / "bin"), env.get("PATH", os.defpath)))
    return {**env, "VIRTUAL_ENV": str(venv), "PATH": path}


class Building:
    """One environment being built, on a thread. Setting `stopped` ends the build within moments."""

    def __init__(self, folder: Path, pid_file: Path, env: Mapping[str, str]) -> None:
        """env: the agent's variables, and the job's own."""
        self._folder = folder
        self._pid_file = PidFile(pid_file)
        self._secret = secrets.token_hex(16)
        self._env = activated(folder, {**env, SECRET: self._secret})
        self._ends_s = 0.0
        self.stopped = threading.Event()

    def make(self, recipe: Recipe, code: Path) -> Path:
        """Build the environment and return its folder. The calling thread must outlive the build: the kernel ends child
        processes with it.

        Raises EnvironmentFailed with the last lines of the failed command, OSError; then the folder is removed."""
        self._ends_s = time.monotonic() + ENVIRONMENT_S
        shutil.rmtree(self._folder, ignore_errors=True)  # torn, of an agent that was killed
        try:
            self._make(recipe, code)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self._folder

    def _make(self, recipe: Recipe, code: Path) -> None:
        self._folder.mkdir(parents=True)
        venv = self._folder / "venv"
        where = self._folder / "code"
        if recipe.code_sha256:
            shutil.copytree(code, where)
        else:
            where.mkdir()
        self._run("making the virtual environment", [sys.executable, "-m", "venv", "--without-pip", str(venv)], where)
        lay_under(venv)
        if recipe.requirements:
            listed = where / ".atoll-requirements.txt"  # in the code's folder, which paths in it are relative to
            listed.write_text("".join(f"{line}\n" for line in recipe.requirements))
            with seen_by_installers(venv):
                name, command = install_command(interpreter(self._folder), listed, self._env)
                self._run(f"`{name} install`", command, where)
        if recipe.setup:
            self._run("its setup", ["/bin/sh", "-ec", recipe.setup], where)
        (self._folder / _WHOLE).touch()

    def _run(self, what: str, command: Sequence[str], where: Path) -> None:
        with (self._folder / "log").open("ab") as output:
            process = subprocess.Popen(
                die_with_parent.command(command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=where,
                env=self._env,
                start_new_session=True,
            )
        try:
            self._pid_file.write(process.pid, self._secret)
            self._wait(what, process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # before wait: until then nobody else's group has this number
            process.wait()
            end_escaped(self._secret)
            self._pid_file.remove()
        if process.returncode:
            raise self._failed(f"{what} ended with exit code {process.returncode}")

    def _wait(self, what: str, pid: int) -> None:
        """Wait until the command has ended. Raises EnvironmentFailed if it takes too long or too much disk."""
        looked_s = time.monotonic()
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self.stopped.wait(_POLL_S):
                raise self._failed(f"{what} was stopped: nobody waits for it any more")
            if (now_s := time.monotonic()) > self._ends_s:
                raise self._failed(f"{what} was not done {ENVIRONMENT_S:.0f} s after the beginning")
            if now_s - looked_s < _LOOK_S:
                continue
            if shutil.disk_usage(self._folder).free < LEAST_FREE_BYTES:
                raise self._failed(f"{what} left less than {LEAST_FREE_BYTES >> 20} MiB free in {self._folder.parent}")
            if bytes_below(self._folder) > MAX_BYTES:
                raise self._failed(f"{what} made it larger than {MAX_BYTES >> 20} MiB")
            looked_s = time.monotonic()

    def _failed(self, why: str) -> EnvironmentFailed:
        with (self._folder / "log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            output = file.read()
        said = " | ".join(last_lines(output, QUOTED_LINES)) or "it printed nothing"
        return EnvironmentFailed(f"the job's environment could not be made: {why}: {said}", output)


def bytes_below(folder: Path) -> int:
    """Return the size of all files in bytes. Files that vanish meanwhile count as 0."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
