"""What a user installs: the checks before setting up, the pins, the wheel, and the parts that run without torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(
    *command: str | Path, timeout_s: float = 30, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **environment}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environ
    )


class Machine:
    """A PATH that holds only the programs a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for tool in ("sh", "mktemp", "rm"):
            self.link(tool)

    def link(self, tool: str) -> None:
        found = shutil.which(tool)
        assert found, f"these tests need {tool}"
        (self.folder / tool).symlink_to(found)

    def program(self, name: str, text: str = "exit 0") -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def python(self, before: str = "pass") -> None:
        """The real Python, but each `-c` program begins with `before`: how a machine is made to lack something."""
        self.program("python3", f'[ "$1" = -c ] && exec {sys.executable} -c "{before}\n$2"\nexec {sys.executable} "$@"')

    def preflight(self, *arguments: str, **environment: str) -> tuple[int, str]:
        environment = {"PATH": str(self.folder), "PYTHON": "python3", "CXX": "", **environment}
        done = run(ROOT / "scripts/preflight", *arguments, environment=environment)
        assert done.stdout == ""
        assert done.stderr.count("\n") <= 1, done.stderr
        return done.returncode, done.stderr.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One on which everything is there: Debian's package manager, a compiler, make, Python."""
    machine = Machine(tmp_path)
    machine.python()
    for tool in ("apt-get", "g++", "make"):
        machine.program(tool)
    return machine


def test_preflight_is_silent_when_everything_is_there(machine: Machine) -> None:
    assert machine.preflight() == (0, "")


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (
            "import sys, platform; sys.version_info = (3, 10, 4); platform.python_version = lambda: '3.10.4'",
            "atoll: python3 is 3.10.4, but 3.11 or newer is needed: install one, then: make PYTHON=python3.11 ...",
        ),
        (
            "import sys; sys.modules['ensurepip'] = None",
            "atoll: python3 has no venv module: sudo apt-get install python3-venv",
        ),
        (
            "import sysconfig; sysconfig.get_path = lambda name: '/nowhere'",
            "atoll: python3 has no C headers (Python.h), which the kernels need: sudo apt-get install python3-dev",
        ),
    ],
    ids=["too old", "without venv", "without headers"],
)
def test_preflight_says_what_is_wrong_with_python(machine: Machine, before: str, says: str) -> None:
    machine.python(before)
    assert machine.preflight() == (1, says)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("python3", "atoll: no python3 on PATH; Python 3.11 or newer is needed: sudo apt-get install python3"),
        ("g++", "atoll: no C++ compiler, which the kernels need: sudo apt-get install g++"),
        ("make", "atoll: no make: sudo apt-get install make"),
    ],
)
def test_preflight_names_the_missing_program_and_how_to_get_it(machine: Machine, missing: str, says: str) -> None:
    (machine.folder / missing).unlink()
    assert machine.preflight() == (1, says)


def test_preflight_speaks_fedora_where_dnf_is(machine: Machine) -> None:
    (machine.folder / "apt-get").rename(machine.folder / "dnf")
    (machine.folder / "g++").unlink()
    assert machine.preflight()[1].endswith(": sudo dnf install gcc-c++")


def test_preflight_refuses_a_compiler_that_is_not_there(machine: Machine) -> None:
    assert machine.preflight(CXX="g++-99")[1].startswith("atoll: CXX=g++-99, but there is no such compiler")
    assert machine.preflight(CXX="g++ -m64") == (0, "")


NO_INDEX = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # nothing listens on the discard port
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONSTRAINT": "",
    "no_proxy": "127.0.0.1",
}


def test_preflight_says_in_one_line_that_no_index_answers(machine: Machine) -> None:
    code, says = machine.preflight("index", PYTHON=sys.executable, **NO_INDEX)
    assert (code, says) == (
        1,
        "atoll: no package index answers; check the network, or point pip at a mirror with PIP_INDEX_URL or pip.conf",
    )


def pins() -> dict[NormalizedName, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    matches = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    assert all(matches), "constraints.txt holds exact versions only"
    return {canonicalize_name(m[1]): Version(m[2]) for m in matches if m}


def asked_for() -> list[Requirement]:
    project = PYPROJECT["project"]
    lists = [PYPROJECT["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for wanted in lists for text in wanted]
    return [requirement for requirement in requirements if requirement.name != project["name"]]


def test_every_requirement_has_a_pin_that_satisfies_it() -> None:
    pinned = pins()
    wrong = [str(r) for r in asked_for() if not r.specifier.contains(pinned[canonicalize_name(r.name)])]
    assert wrong == []


def test_this_environment_holds_the_pinned_versions() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): Version(d.version) for d in importlib.metadata.distributions()}
    wrong = {
        name: f"{installed[name]} in place of {pin}"
        for name, pin in pins().items()
        if name in installed and installed[name].public != pin.public
    }
    assert wrong == {}, "run: make setup"


def test_generated_code_runs_with_the_oldest_libraries_that_are_allowed() -> None:
    """Generated code refuses libraries older than its generator: a lower bound below that installs a broken Atoll."""
    generated = Path(str(importlib.import_module("atoll.v1.jobs_pb2").__file__)).parent
    grpc_line = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (generated / "jobs_pb2_grpc.py").read_text())
    protobuf_lines = re.search(r"PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", (generated / "jobs_pb2.py").read_text())
    assert grpc_line
    assert protobuf_lines
    lower = {r.name: next(s.version for s in r.specifier if s.operator == ">=") for r in asked_for() if ">=" in str(r)}
    assert Version(lower["grpcio"]) >= Version(grpc_line[1])
    assert Version(lower["protobuf"]) >= Version(".".join(protobuf_lines.groups()))


WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors.torch", *{blocked!r}):
    sys.modules[name] = None  # importing it now fails
importlib.import_module({module!r})
assert not [name for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and module]
"""


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("atoll", ["grpc", "etcd3aio", "zmq"]),
        ("atoll.cli.main", ["etcd3aio", "zmq"]),
        ("atoll.controller.daemon", ["zmq", "pynvml"]),
        ("atoll.agent.daemon", ["etcd3aio"]),
    ],
)
def test_a_daemon_starts_without_torch_and_without_the_other_daemons_packages(module: str, blocked: list[str]) -> None:
    done = run(sys.executable, "-c", WITHOUT_TORCH.format(module=module, blocked=blocked))
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built apart from the editable install's build folder, which belongs to whoever works in this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    pip_wheel = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    settings = [f"-Cbuild-dir={folder}/build", "-Ccmake.define.ATOLL_CUDA=OFF"]
    done = run(*pip_wheel, *settings, environment={"PIP_CONSTRAINT": ""}, timeout_s=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.timeout(150)
def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert top == {"atoll", f"atoll-{PYPROJECT['project']['version']}.dist-info"}
    assert {Path(name).suffix for name in names if name.startswith("atoll/")} <= {".py", ".pyi", ".so", ".typed"}
    for needed in ("__init__.py", "py.typed", "v1/jobs_pb2.pyi", "kernels/_native.pyi", "controller/__init__.py"):
        assert f"atoll/{needed}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.timeout(150)
def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are borrowed from this environment, behind the fresh one's own packages."""
    fresh = tmp_path / "fresh"
    assert run(sys.executable, "-m", "venv", "--without-pip", fresh).returncode == 0
    python = fresh / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "-q", "install", "--no-deps", "--no-index"]
    installed = run(*pip, str(wheel), environment={"PIP_CONSTRAINT": ""})
    assert installed.returncode == 0, installed.stderr
    (packages,) = fresh.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    code = "import array, atoll.kernels as k, atoll.v1.jobs_pb2 as p; print(k.squared_norm(array.array('f', [3, 4])))"
    used = run(python, "-I", "-c", f"{code}; print(k.__file__, p.__file__, sep='\\n')")
    files = [f"{packages}/atoll/{name}" for name in ("kernels/__init__.py", "v1/jobs_pb2.py")]
    assert (used.stdout.split(), used.stderr) == (["25.0", *files], "")
    assert run(fresh / "bin/atoll", "--help").returncode == 0


def test_make_help_lists_every_command_a_user_may_type() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    listed = [line.split()[0] for line in run("make", "--no-print-directory", "help").stdout.splitlines()]
    assert sorted(listed) == sorted(phony[1].split())
