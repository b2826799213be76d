"""Checkpoints in object stores: fsspec's memory and local file systems, which behave like a bucket and like a disk; and
S3 itself, against a server in this process, where s3fs and moto are installed."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from atoll.agent.runtime.checkpoints.disk import fence, files, listing
from atoll.agent.runtime.checkpoints.disk.folders import Moment
from atoll.agent.runtime.checkpoints.disk.manifest import MANIFEST_FILE, STATE_FILE
from atoll.agent.runtime.checkpoints.disk.store import Store, StoreFence, answered
from atoll.agent.runtime.checkpoints.upload import Uploader
from atoll.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of a server that speaks S3."""
    pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server]' to test against an S3 server")
    moto = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
    elif request.param == "memory":
        yield f"memory://{secrets.token_hex(8)}/vit"
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))  # as a user would name his own server
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        bucket = f"bucket-{secrets.token_hex(8)}"
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}/vit"
        fsspec.filesystem("s3").clear_instance_cache()


def file_of(url: str, moment: Moment, name: str) -> tuple[Any, str]:
    system, root = fsspec.core.url_to_fs(url)
    return system, f"{root}/{moment.name}/{name}"


def put(url: str, path: Path, stopped: Callable[[], bool] = lambda: False) -> bool:
    return Store(url).put((path / MANIFEST_FILE).read_bytes(), lambda name: listing.parts(path / name), stopped)


@pytest.fixture
def uploaded(tmp_path: Path, url: str) -> Iterator[tuple[Uploader, list[str]]]:
    """A uploader of tmp_path/jobs that keeps 2, and 1 of each 100 steps; and what it told."""
    told: list[str] = []
    uploader = Uploader(
        url,
        tmp_path / "jobs",
        run=9,
        keep=2,
        keep_every_steps=100,
        notify=lambda _, text: told.append(text.replace(url, "URL")),
    )
    yield uploader, told
    uploader.close()


def steps(url: str) -> list[int]:
    return sorted(moment.step for moment in Store(url).list().whole)


def level(uploader: Uploader) -> None:
    uploader.wake()
    assert uploader.idle_within(60)


def test_what_was_carried_comes_back_byte_for_byte(tmp_path: Path, url: str, header: Any, tensors: Tensors) -> None:
    assert Store(url).list().whole == {}
    path = files.write(tmp_path / "here", header(), tensors, {"lr": 0.1})
    assert put(url, path)
    moment = Moment(3, 100)
    stored = Store(url).list().whole[moment]
    assert stored.state_bytes == (path / STATE_FILE).stat().st_size
    assert stored.modified_unix_s is not None
    found, sealed = Store(url).manifest(moment)
    assert found.header == header()
    back = files.adopt(tmp_path / "there", sealed, partial(Store(url).state, moment), 9)
    for name in (STATE_FILE, MANIFEST_FILE):
        assert (back / name).read_bytes() == (path / name).read_bytes()
    read = files.read_opened(found, partial(Store(url).opened, moment), url)
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    Store(url).remove(moment)
    Store(url).remove(moment)
    gone = Store(url).list()
    assert (gone.whole, gone.torn) == ({}, frozenset())


def test_what_is_cut_off_or_damaged_does_not_count(tmp_path: Path, url: str, header: Any, tensors: Tensors) -> None:
    """1. An upload is stopped between two parts. 2. A file is damaged before its upload. 3. One is damaged there."""
    path, moment = files.write(tmp_path, header(), tensors, None), Moment(3, 100)
    assert not put(url, path, stopped=lambda: True)
    assert Store(url).list().torn == {moment}
    with (path / STATE_FILE).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged and stays here: bytes 0 to"):
        put(url, path)
    assert Store(url).list().whole == {}
    whole = files.write(tmp_path / "other", header(), tensors, None)
    assert put(url, whole)
    system, file_there = file_of(url, moment, STATE_FILE)
    content = bytearray(system.cat_file(file_there))
    content[-5] ^= 1
    system.pipe_file(file_there, bytes(content))
    found, sealed = Store(url).manifest(moment)
    with pytest.raises(CheckpointError, match="is damaged: bytes 0 to"):
        files.adopt(tmp_path / "there", sealed, partial(Store(url).state, moment), 9)
    with pytest.raises(CheckpointError, match="is damaged: bytes 0 to"):
        files.read_opened(found, partial(Store(url).opened, moment), url)
    assert listing.newest(tmp_path / "there") == []
    system, manifest_there = file_of(url, moment, MANIFEST_FILE)
    system.pipe_file(manifest_there, sealed[:-3])
    with pytest.raises(CheckpointError, match="torn or damaged"):
        Store(url).manifest(moment)


def test_a_store_that_is_not_what_it_seems_says_so(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError, match=r"no-such://bucket: opening it failed: ValueError: Protocol not known"):
        Store("no-such://bucket")
    (tmp_path / "file").write_text("no folder")
    path = files.write(tmp_path / "jobs", header(), {}, None)
    with pytest.raises(CheckpointError, match=f"writing {path.name} failed: NotADirectoryError"):
        put(f"file://{tmp_path}/file/below", path)


def test_the_store_keeps_the_newest_and_one_for_good(
    tmp_path: Path, url: str, uploaded: tuple[Uploader, list[str]], header: Any
) -> None:
    uploader, told = uploaded
    for step in (50, 100, 150, 200, 250):
        files.write(tmp_path / "jobs", header(step), {}, None)
        listing.keep_newest(tmp_path / "jobs", 2, 100)
        level(uploader)
    assert steps(url) == [100, 200, 250]
    assert sorted(path.name for path in (tmp_path / "jobs").glob("step-*")) == [
        Moment(3, step).name for step in (100, 200, 250)
    ]
    assert told == []


@pytest.mark.parametrize("where", ["store", "directory"])
def test_a_fenced_run_uploads_and_removes_no_more(
    tmp_path: Path,
    url: str,
    uploaded: tuple[Uploader, list[str]],
    header: Any,
    where: str,
) -> None:
    """1. Run 9 uploads; it is cut off and lives on unseen. 2. Run 10 begins: it writes to the store from another
    machine, or takes the directory that both share, while run 9 has checkpoints to upload. 3. Run 9 went on uploading,
    and removed by its own retention. 4. Now it stops for good, and says so once."""
    uploader, told = uploaded
    files.write(tmp_path / "jobs", header(50), {}, None)
    level(uploader)
    for step in (150, 250, 350):
        files.write(tmp_path / "jobs", header(step), {}, None)
    if where == "store":
        put(url, files.write(tmp_path / "other", header(60, run=10), {}, None))
    else:
        fence.take(tmp_path / "jobs", 10)
    there = Store(url).list().whole.keys()
    level(uploader)
    assert Store(url).list().whole.keys() == there
    level(uploader)
    assert told == ["run 9 uploads no more: it was fenced by run 10"]


def test_a_run_that_does_not_know_of_a_newer_one_publishes_nothing(
    tmp_path: Path, url: str, uploaded: tuple[Uploader, list[str]], header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Run 9 has written a state file to the store and looked for newer runs there: none. 2. It is cut off right
    before its manifest; run 10 begins. 3. Run 9 lives on and wrote the manifest, for a store refused nothing. 4. Now
    the next number of the store's fence is taken, and no manifest comes."""
    uploader, told = uploaded
    files.write(tmp_path / "jobs", header(50), {}, None)
    level(uploader)
    files.write(tmp_path / "jobs", header(150), {}, None)
    create = Store.create

    def cut_off(store: Store, name: str, content: bytes) -> bool:
        if content == b"9\n":
            monkeypatch.setattr(Store, "create", create)
            assert StoreFence(10).advance(Store(url)) == 10
        return create(store, name, content)

    monkeypatch.setattr(Store, "create", cut_off)
    level(uploader)
    assert steps(url) == [50]
    assert told == ["run 9 uploads no more: it was fenced by run 10"]


def test_who_wakes_after_many_others_takes_no_number_that_was_removed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Run 9 has looked: number 2 is the newest. 2. It sleeps; run 10 takes a dozen and removes all but two. 3. Run 9
    wakes and takes number 3, which is free again: it sees that others are further, and that they are newer."""
    store, slept, newest = Store(url), StoreFence(9), StoreFence._newest
    assert slept.advance(store) == 9

    def asleep(fence: StoreFence, store: Store) -> tuple[int, int]:
        seen = newest(fence, store)
        monkeypatch.setattr(StoreFence, "_newest", newest)
        awake = StoreFence(10)
        assert [awake.advance(store) for _ in range(12)] == [10] * 12
        return seen

    monkeypatch.setattr(StoreFence, "_newest", asleep)
    assert slept.advance(store) == 10
    assert StoreFence(10).advance(store) == 10
    assert StoreFence(9).advance(store) == 10
    assert len(store.names("fence")) <= 3


def test_a_store_that_cannot_fence_is_told_of_once(
    tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Some servers ignore the condition, some backends have none. 2. Nobody said so. 3. Uploads go on, with an
    event."""
    url, told = f"memory://{secrets.token_hex(8)}", []
    monkeypatch.setattr(
        Store, "create", lambda self, name, content: self._files.pipe_file(self._path(name), content) or True
    )
    uploader = Uploader(
        url, tmp_path, run=9, keep=2, keep_every_steps=0, notify=lambda kind, text: told.append(text)
    )  # fmt: skip
    for step in (50, 100):
        files.write(tmp_path, header(step), {}, None)
        level(uploader)
    assert steps(url) == [50, 100]
    assert told == [
        f"{url} ignores the condition of conditional writes: a run that is cut off and lives on is noticed there, but "
        "not fenced"
    ]
    monkeypatch.setattr(Store, "creates_atomically", False)
    fence_of_none = StoreFence(9)
    assert fence_of_none.advance(Store(url)) == 9
    assert fence_of_none.warning == f"{url}: its backend has no conditional writes"


def test_a_failing_store_is_told_once_and_made_up_for(
    tmp_path: Path, url: str, uploaded: tuple[Uploader, list[str]], header: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The store refuses twice: one event. 2. It works again: the newest two are there, and the event says so."""
    uploader, told = uploaded

    def refuse(*_: object) -> None:
        raise CheckpointError("URL: writing failed: 503 Slow Down")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "put", refuse)
        for step in (10, 20, 30):
            files.write(tmp_path / "jobs", header(step), {}, None)
            level(uploader)
    assert len(told) == 1
    assert "503 Slow Down. Training continues" in told[0]
    level(uploader)
    assert steps(url) == [20, 30]
    assert told[1:] == ["checkpoints are uploaded to URL again"]


def test_what_dead_writers_left_in_the_store_goes_and_a_damaged_one_here_keeps_nobody_back(
    tmp_path: Path, url: str, uploaded: tuple[Uploader, list[str]], header: Any, tensors: Tensors
) -> None:
    uploader, told = uploaded
    old = files.write(tmp_path / "old", header(10, run=2), tensors, None)
    put(url, old, stopped=lambda: True)
    files.write(tmp_path / "jobs", header(20), tensors, None)
    newest = files.write(tmp_path / "jobs", header(30), tensors, None)
    with (newest / STATE_FILE).open("r+b") as file:
        file.seek(3000)
        file.write(b"damage")
    level(uploader)
    assert steps(url) == [20]
    assert Store(url).list().torn == {Moment(3, 30)}
    assert "is damaged and stays here" in told[0]


def test_a_carrier_killed_at_any_moment_leaves_the_older_one_good(tmp_path: Path, header: Any) -> None:
    """1. A child carries one checkpoint after another to a disk. 2. SIGKILL. 3. What counts there is whole."""
    url, newest = f"file://{tmp_path / 'store'}", 0
    for moment_s in (0.0, 0.02, 0.04, 0.06, 0.1, 0.2, 1.0, 5.0, 20.0):
        if newest and moment_s >= 1.0:
            break  # those are for a machine too busy to have carried any yet
        begun, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)  # OpenMP's threads did not come along
                os.write(begin, b".")
                for step in range(newest + 1, newest + 1000):
                    weights = torch.full((50_000,), float(step))
                    put(url, files.write(tmp_path / "jobs", header(step), {"w": weights}, None))
            finally:
                os._exit(1)
        os.close(begin)
        os.read(begun, 1)
        os.close(begun)
        time.sleep(moment_s)  # the moment is what is tested
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        found = sorted(Store(url).list().whole, reverse=True)
        for moment in found:
            try:
                sound, _ = Store(url).manifest(moment)
            except CheckpointError:
                assert moment == found[0], "only the one under way may be torn"
                continue
            read = files.read_opened(sound, partial(Store(url).opened, moment), url)
            assert set(read.tensors["w"].tolist()) == {float(moment.step)}
            newest = max(newest, moment.step)
    assert newest > 0


def test_a_store_that_hangs_is_given_up() -> None:
    over = threading.Event()
    try:
        with pytest.raises(CheckpointError, match=r"did not answer within 0\.05 s"):
            answered("memory://hangs", lambda _: over.wait(30), 0.05)
    finally:
        over.set()
