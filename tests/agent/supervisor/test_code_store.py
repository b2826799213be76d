"""Code bundles: fetched once, checked, unpacked whole or not at all."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from agent_harness import bundle_of

from atoll.agent.supervisor.environments import code_store
from atoll.agent.supervisor.environments.code_store import CodeStore, find_script, retire, unpack
from atoll.errors import BadInput, ControllerUnreachable, DeadlineExceeded, NotFound

BUNDLE = bundle_of({"train.py": "print('hi')", "lib/model.py": "x = 1"})
SHA = hashlib.sha256(BUNDLE).hexdigest()


def fetch(*answers: bytes | Exception) -> tuple[Callable[[str], AsyncIterator[bytes]], list[str]]:
    """A controller that gives these answers in turn, and what it was asked for."""
    left, asked = list(answers), list[str]()

    async def answer(sha256: str) -> AsyncIterator[bytes]:
        asked.append(sha256)
        await asyncio.sleep(0)
        given = left.pop(0)
        if isinstance(given, Exception):
            raise given
        for at in range(0, len(given), 100):
            yield given[at : at + 100]

    return answer, asked


async def test_workers_of_one_job_share_a_fetch(tmp_path: Path) -> None:
    answer, asked = fetch(BUNDLE)
    store = CodeStore(tmp_path / "code", answer)
    folders = await asyncio.gather(*(store.get(SHA, set) for _ in range(3)))
    assert await store.get(SHA, set) == folders[0]
    assert asked == [SHA]
    assert (folders[0] / "lib" / "model.py").read_text() == "x = 1"
    assert find_script(folders[0], "train.py").is_file()
    await store.close()


async def test_controller_that_goes_away_meanwhile_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "_RETRY_S", 0.01)
    answer, asked = fetch(ControllerUnreachable("gone"), ControllerUnreachable("gone"), BUNDLE)
    store = CodeStore(tmp_path / "code", answer)
    assert (await store.get(SHA, set)).is_dir()
    assert len(asked) == 3
    await store.close()


async def test_fetch_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_store, "_RETRY_S", 0.01)
    monkeypatch.setattr(code_store, "FETCH_DEADLINE_S", 0.1)
    answer, _ = fetch(*[ControllerUnreachable("nobody there")] * 100)
    store = CodeStore(tmp_path / "code", answer)
    with pytest.raises(DeadlineExceeded, match="nobody there"):
        await store.get(SHA, set)
    await store.close()


async def test_damaged_oversize_and_unknown_code_is_refused(tmp_path: Path) -> None:
    answer, _ = fetch(BUNDLE[:-1], b"x" * (8 * 1024 * 1024 + 1), NotFound("no such code"), BUNDLE)
    store = CodeStore(tmp_path / "code", answer)
    for error, match in ((BadInput, "damaged"), (BadInput, "larger"), (NotFound, "no such code")):
        with pytest.raises(error, match=match):
            await store.get(SHA, set)
        assert list((tmp_path / "code").iterdir()) == []
    assert (await store.get(SHA, set)).is_dir(), "a failure is not remembered"
    await store.close()


def tar_with(member: tarfile.TarInfo, data: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_nothing_leaves_the_folder(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    device = tarfile.TarInfo("null")
    device.type = tarfile.CHRTYPE
    for bundle in (tar_with(tarfile.TarInfo("../evil.py"), b"x"), tar_with(link), tar_with(device), BUNDLE[:50], b"no"):
        with pytest.raises(BadInput):
            unpack(bundle, tmp_path, SHA)
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "evil.py").exists()


def test_small_bundle_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.jobs.code_bundle.MAX_UNPACKED_BYTES", 1_000_000)
    monkeypatch.setattr("atoll.jobs.code_bundle.MAX_FILES", 10)
    zeros = tar_with(tarfile.TarInfo("zeros"), bytes(2_000_000))
    headers = gzip.compress(bytes(50_000_000))  # an endless archive of nothing
    many = bundle_of({f"f{n}": "" for n in range(11)})
    assert len(zeros) < 10_000
    for bundle, why in ((zeros, "more than 1000000 bytes"), (many, "or 10 files")):
        with pytest.raises(BadInput, match=why):
            unpack(bundle, tmp_path, SHA)
    unpack(headers, tmp_path, SHA)
    assert list((tmp_path / SHA).iterdir()) == [], "two zero blocks end an archive"


def test_newest_bundles_are_kept_and_those_in_use(tmp_path: Path) -> None:
    names = [hashlib.sha256(bytes([n])).hexdigest() for n in range(12)]
    for n, name in enumerate(names):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (n, n))
    doomed = retire(tmp_path, 8, {names[0]})
    assert {path.name for path in tmp_path.iterdir() if path not in doomed} == {names[0], *names[4:]}
    assert len(doomed) == 3
    assert all(path.name.startswith(".") for path in doomed), "no longer found by whoever asks for the bundle next"


def test_script_outside_the_bundle_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "out.py").symlink_to("/etc/passwd")
    for script in ("trian.py", "out.py", "."):
        with pytest.raises(BadInput, match=r"train\.py"):
            find_script(tmp_path, script)
