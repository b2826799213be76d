"""Environments of jobs, made for real from wheels that lie in the job's code: no index is asked."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_harness import until
from made_wheels import make_wheel

from atoll.agent.supervisor.environments import building
from atoll.agent.supervisor.environments.building import activated, interpreter, is_from_an_index, recipe_of
from atoll.agent.supervisor.environments.store import MAX_ENVIRONMENTS, EnvironmentStore
from atoll.errors import EnvironmentFailed, NotFound
from atoll.v1.common_pb2 import JobSpec

SHA = "5a" * 32
OFFLINE = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}


def spec(*requirements: str, setup: str = "", **changes: Any) -> JobSpec:
    return JobSpec(code_sha256=SHA, requirements=requirements, setup=setup, env=OFFLINE, **changes)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    make_wheel(folder / "wheels", "tiny", "1.5")
    return folder


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EnvironmentStore]:
    made = EnvironmentStore(tmp_path / "environments", tmp_path)
    yield made
    await made.close()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".pid")]


class Asked:
    """What was told, and a short way to ask."""

    def __init__(self, store: EnvironmentStore, code: Path) -> None:
        self._store = store
        self._code = code
        self.told: list[str] = []

    async def __call__(self, wanted: JobSpec) -> Path:
        found = await self._store.get(wanted, self._code, set, self.told.append)
        assert found is not None
        return found


@pytest.fixture
def get(store: EnvironmentStore, code: Path) -> Asked:
    return Asked(store, code)


def ran(environment: Path, program: str) -> str:
    command = [str(interpreter(environment)), "-c", program]
    env = activated(environment, os.environ)
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=True, env=env).stdout


def test_what_environments_are_told_apart_by() -> None:
    """1. By requirements, setup, where packages come from, and what the agent has. 2. By the code only where it may be
    read. 3. Not by other variables, nor by the job's name."""
    wanted = JobSpec(requirements=["einops>=0.8", "a[b] @ https://host/a.whl"], code_sha256=SHA, name="a")
    first = recipe_of(wanted, "base")
    assert recipe_of(wanted, "other").digest != first.digest
    alike = JobSpec(requirements=wanted.requirements, code_sha256="6b" * 32, name="b", env={"LR": "1"})
    assert recipe_of(alike, "base").digest == first.digest
    for changes in ({"requirements": ["einops>=0.9"]}, {"setup": "make"}, {"env": {"PIP_INDEX_URL": "https://host"}}):
        other = JobSpec(**{"requirements": wanted.requirements, "code_sha256": SHA} | changes)  # type: ignore[arg-type]
        assert recipe_of(other, "base").digest != first.digest
    reads = JobSpec(requirements=["./package"], code_sha256=SHA)
    assert recipe_of(reads, "").digest != replace(recipe_of(reads, ""), code_sha256="6b" * 32).digest
    for line in ("torch", "x==1.0 ; python_version < '4'", "x @ git+https://host/x", "x[y]~=1"):
        assert is_from_an_index(line), line
    for line in (".", "./x", "x-1-py3-none-any.whl", "wheels/x.whl", "-r more.txt", "x @ file:///x", "--no-index"):
        assert not is_from_an_index(line), line


@pytest.fixture(params=["uv pip", "pip"])
def installer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    beside = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    if request.param == "uv pip" and shutil.which("uv", path=beside) is None:
        pytest.skip("uv is not installed here")
    if request.param == "pip":
        which = shutil.which
        monkeypatch.setattr(
            building.shutil, "which", lambda name, path: None if name == "uv" else which(name, path=path)
        )
    return str(request.param)


async def test_a_job_has_its_packages_and_those_of_its_agent(
    get: Asked, code: Path, store: EnvironmentStore, installer: str
) -> None:
    """1. A wheel in the code, and one that wants what the agent has: both are there, and torch is the agent's. 2. The
    setup ran once, in a copy of the code, with the environment's programs. 3. Who asks again gets the same folder at
    once, and so do those who ask meanwhile. 4. No name of the agent's packages is left in it. 5. A job that wants
    nothing has none."""
    make_wheel(code / "wheels", "needy", "2.0", requires=("tiny>=1", "numpy>=1.20", "torch"))
    wanted = spec(
        "./wheels/tiny-1.5-py3-none-any.whl", "./wheels/needy-2.0-py3-none-any.whl", setup="which python > by"
    )
    folders = await asyncio.gather(get(wanted), get(wanted))
    assert folders[0] == folders[1] == await get(wanted)
    assert len(get.told) == 1
    program = """if True:
        import importlib.util
        import needy, numpy, tiny, atoll
        print(tiny.VERSION, needy.VERSION, numpy.__file__, importlib.util.find_spec("torch").origin)
        """
    import numpy
    import torch

    assert ran(folders[0], program) == f"1.5 2.0 {numpy.__file__} {torch.__file__}\n"
    assert (folders[0] / "code" / "by").read_text() == f"{interpreter(folders[0])}\n"
    assert not (code / "by").exists()
    packages = {path.name for path in folders[0].glob("venv/lib/*/site-packages/*.dist-info")}
    assert packages == {"tiny-1.5.dist-info", "needy-2.0.dist-info"}
    assert f"{installer} install" in str((await refused(get, spec("not-there-at-all"))).value)
    assert await store.get(JobSpec(code_sha256=SHA), code, set, get.told.append) is None


async def refused(get: Asked, wanted: JobSpec) -> pytest.ExceptionInfo[EnvironmentFailed]:
    with pytest.raises(EnvironmentFailed) as error:
        await get(wanted)
    return error


async def test_failures_are_told_with_the_last_lines_and_leave_nothing(get: Asked, tmp_path: Path) -> None:
    """1. A setup that fails. 2. Asked again, it is tried again. 3. Nothing is left of it."""
    for _ in range(2):
        error = await refused(get, spec(setup="echo one; echo two; nonsense; echo three"))
        assert "its setup ended with exit code 127: one | two | " in str(error.value)
        assert str(error.value).rstrip().endswith("not found")
        assert b"two\n" in error.value.output
    assert len(get.told) == 2
    assert not list((tmp_path / "environments").iterdir())


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("ENVIRONMENT_S", 0.5, "was not done"),
        ("MAX_BYTES", 1000, "larger than"),
        ("LEAST_FREE_BYTES", 1 << 62, "MiB free"),
    ],
)
async def test_limits_end_what_exceeds_them(
    get: Asked, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, said: str
) -> None:
    """The setup would sleep for ten minutes, and so would what it started."""
    monkeypatch.setattr(building, limit, value)
    monkeypatch.setattr(building, "_LOOK_S", 0.1)
    error = await refused(get, spec(setup="sleep 601 & setsid sleep 602 & echo begun; sleep 603"))
    assert said in str(error.value)


async def test_what_nobody_waits_for_is_stopped(get: Asked, tmp_path: Path) -> None:
    """1. Two workers wait; one is stopped: it goes on. 2. The other, too: it ends. 3. Who asks then begins anew."""
    begun, asleep = tmp_path / "begun", tmp_path / "asleep"
    wanted = spec(setup=f"echo x >> {begun}; test -e {tmp_path}/go || {{ touch {asleep}; sleep 600; }}")
    waiters = [asyncio.create_task(get(wanted)) for _ in range(2)]
    await until("it has begun", asleep.exists, 60)
    waiters[0].cancel()
    await asyncio.wait(waiters[:1])
    assert not waiters[1].done()
    (tmp_path / "go").touch()
    waiters[1].cancel()
    assert (await get(wanted)).is_dir()
    assert begun.read_text() == "x\nx\n"


async def test_the_newest_are_kept_and_those_in_use(
    store: EnvironmentStore, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    async def make(number: int, in_use: Callable[[], set[str]]) -> None:
        found = await store.get(spec(setup=f": {number}"), code, in_use, lambda _: None)
        assert found is not None
        os.utime(found, (number, number))
        made.append(found)

    for number in range(MAX_ENVIRONMENTS + 2):
        await make(number, lambda: {made[0].name} if made else set())
    await store.close()
    assert [path.is_dir() for path in made] == [True, False, *[True] * MAX_ENVIRONMENTS]


async def test_torn_ones_are_removed_at_the_start(tmp_path: Path) -> None:
    for name in (SHA, f".{SHA}.x", "6b" * 32, "downloads"):
        (tmp_path / "environments" / name).mkdir(parents=True)
    (tmp_path / "environments" / ("6b" * 32) / "whole").touch()
    await EnvironmentStore(tmp_path / "environments", tmp_path).close()
    assert {path.name for path in (tmp_path / "environments").iterdir()} == {"6b" * 32, "downloads"}


def test_without_an_installer_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotFound, match="neither uv nor pip"):
        building.install_command(tmp_path, tmp_path, {})
