"""The private etcd: starts, keeps its data, comes back when killed, and never outlives its controller."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from atoll.controller.state import embedded
from atoll.controller.state.election import read_until_answered
from atoll.controller.state.embedded import EmbeddedEtcd
from atoll.controller.state.etcd import EtcdStore
from atoll.controller.state.etcd_binary import EtcdBinary, candidates, find_etcd
from atoll.controller.state.store import Put
from atoll.errors import StoreUnavailable


@pytest.fixture
async def private(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
    await etcd.start()
    yield etcd
    await etcd.stop()


async def test_data_outlives_stop_and_start(private: EmbeddedEtcd, tmp_path: Path) -> None:
    store = EtcdStore([private.endpoint], None)
    await store.commit([Put("/atoll/a", b"1")])
    await store.close()
    pid = private.pid
    assert pid is not None
    await private.stop()
    await private.stop()
    assert private.pid is None
    assert not psutil.pid_exists(pid)
    again = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
    await again.start()
    store = EtcdStore([again.endpoint], None)
    entry = await store.read("/atoll/a")
    await store.close()
    await again.stop()
    assert entry is not None
    assert entry.value == b"1"


ATTACK = """
    import asyncio, json, os, sys
    from atoll.controller.state.etcd import EtcdStore
    from atoll.controller.state.store import Put

    async def attempt(address):
        store = EtcdStore([address], None, timeout_s=2)
        try:
            await store.commit([Put("/atoll/jobs/mine", b"code of mine")])
            return (await store.read("/atoll/jobs/theirs")).value.decode()
        except Exception as error:
            return type(error).__name__
        finally:
            await store.close()

    async def main():
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
        return [await attempt(address) for address in sys.argv[1:]]

    print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("binary", list(candidates()), ids=lambda path: path.parent.name)
async def test_another_user_of_the_machine_can_neither_read_nor_write_it(
    binary: Path, others_enter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A controller's etcd holds a job with a secret. It used to listen on ports of loopback. 2. A process of user
    nobody tries every port and every socket of it: it could read the secret and write a job, whose code then ran on
    every node. 3. It must get neither, also where the data lies in a folder that others may enter."""
    monkeypatch.setattr(embedded, "find_etcd", lambda: EtcdBinary(binary, (3, 6, 0)))
    etcd = EmbeddedEtcd(others_enter / "data", others_enter / "etcd.log")
    await etcd.start()
    store = EtcdStore([etcd.endpoint], None)
    try:
        await store.commit([Put("/atoll/jobs/theirs", b"a secret")])
        reached_at = [*(f"127.0.0.1:{port}" for port in _ports(etcd)), *_sockets(others_enter)]
        assert len(reached_at) == 2  # for controllers, and for members
        attack = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(ATTACK), *reached_at, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await attack.communicate()
        assert json.loads(output) == ["StoreUnavailable"] * 2
        assert await store.read("/atoll/jobs/mine") is None
    finally:
        await store.close()
        await etcd.stop()


@pytest.fixture
def others_enter() -> Iterator[Path]:
    """A folder in which nothing above keeps another user out, with a folder for data that somebody made before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "data").mkdir(mode=0o755)
        yield folder


def _sockets(folder: Path) -> list[str]:
    return [f"unix:{path}" for path in folder.rglob("*") if path.is_socket()]


def _ports(etcd: EmbeddedEtcd) -> list[int]:
    connections = psutil.Process(etcd.pid).net_connections("inet")
    return [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]


async def test_it_listens_on_no_port(private: EmbeddedEtcd) -> None:
    assert _ports(private) == []


async def test_a_data_directory_of_any_length_can_be_used(tmp_path: Path) -> None:
    """The path of a socket has 107 bytes at most."""
    etcd = EmbeddedEtcd(tmp_path / ("long" * 30) / "data", tmp_path / "etcd.log")
    await etcd.start()
    store = EtcdStore([etcd.endpoint], None)
    await store.commit([Put("/atoll/a", b"1")])
    await store.close()
    await etcd.stop()


async def test_a_killed_child_is_started_again_on_its_socket_with_its_data(
    private: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    store = EtcdStore([private.endpoint], None)
    try:
        revision = await store.commit([Put("/atoll/a", b"1")])
        first = private.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(30):
            while private.pid in (first, None):  # noqa: ASYNC110 - it is another process that changes
                await asyncio.sleep(0.02)
            entry = await read_until_answered(store, "/atoll/a")
        assert entry is not None
        assert entry.mod_revision == revision
        assert "etcd ended with -9; starting it again" in caplog.text
    finally:
        await store.close()


async def test_a_data_directory_in_use_is_refused_and_its_etcd_left_alone(
    private: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_UNLOCK_S", 0.3)
    second = EmbeddedEtcd(tmp_path / "data", tmp_path / "second.log")
    with pytest.raises(StoreUnavailable, match="in use by another etcd"):
        await second.start()
    assert second.pid is None
    assert private.pid is not None


async def test_an_etcd_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "member").write_text("a file where etcd wants a directory")
    etcd = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
    with pytest.raises(StoreUnavailable) as refused:
        await etcd.start()
    assert re.search(
        r"(?s)etcd ended with \d+ while starting\. Last lines of .*etcd\.log:\n.*member", str(refused.value)
    )
    assert etcd.pid is None


async def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"cannot keep data in .*file/data"):
        await EmbeddedEtcd(tmp_path / "file" / "data", tmp_path / "etcd.log").start()


async def test_an_etcd_that_may_lose_data_is_warned_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embedded, "_STOP_S", 30.0)  # one that is killed is warned of, too
    path = find_etcd().path
    for version, warnings in (((3, 5, 1), 1), ((3, 5, 30), 0)):
        caplog.clear()
        monkeypatch.setattr(embedded, "find_etcd", lambda version=version: EtcdBinary(path, version))
        etcd = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
        await etcd.start()
        await etcd.stop()
        assert len(caplog.messages) == warnings
        assert all("`atoll install-etcd`" in message for message in caplog.messages)


async def test_settings_of_etcd_in_the_environment_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_DATA_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("ETCD_CLIENT_CERT_AUTH", "true")
    etcd = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
    await etcd.start()
    await etcd.stop()
    assert (tmp_path / "data" / "member").is_dir()
    assert not (tmp_path / "elsewhere").exists()


CONTROLLER = """
    import asyncio, sys
    from pathlib import Path
    from atoll.controller.state.embedded import EmbeddedEtcd

    async def main():
        etcd = EmbeddedEtcd(Path(sys.argv[1]), Path(sys.argv[2]))
        await etcd.start()
        print(etcd.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


async def test_it_dies_with_a_controller_that_is_killed_and_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A process starts an etcd. 2. It is killed with SIGKILL. 3. etcd is gone. 4. The data can be used again."""
    monkeypatch.setattr(embedded, "_UNLOCK_S", 30.0)  # on a busy machine etcd takes long to end in order
    controller = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(CONTROLLER),
        str(tmp_path / "data"),
        str(tmp_path / "etcd.log"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert controller.stdout is not None
    try:
        child = psutil.Process(int(await asyncio.wait_for(controller.stdout.readline(), 30)))
        assert Path(child.exe()) == find_etcd().path.resolve()
    finally:
        controller.kill()
        await controller.communicate()
    following = EmbeddedEtcd(tmp_path / "data", tmp_path / "etcd.log")
    await following.start()  # waits until the first has let go of its data
    gone, alive = await asyncio.to_thread(psutil.wait_procs, [child], timeout=30)
    await following.stop()
    assert (len(gone), alive) == (1, [])
