"""What travels to the nodes: which files, the same bytes for the same files, and a limit that says what is big."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import BadInput, NotFound
from atoll.jobs import code_bundle
from atoll.jobs.code_bundle import pack


def lay_out(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    return root


def members(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        return archive.getmembers()


def test_a_script_brings_the_python_files_of_its_folder(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        *("train.py", "model/net.py", "data.csv", ".secret.py", ".git/hook.py", "__pycache__/x.py"),
        *("env/pyvenv.cfg", "env/lib/site.py", "node_modules/a.py"),
    )
    packed = pack(tmp_path / "train.py")
    assert packed.files == ("model/net.py", "train.py")
    assert packed.script == "train.py"


def test_a_workdir_brings_everything_in_it(tmp_path: Path) -> None:
    lay_out(tmp_path, "jobs/train.py", "conf/a.toml", "lib/x.py", ".env", "env/pyvenv.cfg", "env/bin/python")
    packed = pack(tmp_path / "jobs/train.py", tmp_path)
    assert packed.files == ("conf/a.toml", "jobs/train.py", "lib/x.py")
    assert packed.script == "jobs/train.py"


def test_a_script_that_would_be_skipped_comes_along(tmp_path: Path) -> None:
    lay_out(tmp_path, "run", "a.py")
    assert pack(tmp_path / "run").files == ("a.py", "run")


def test_owner_time_and_mode_leave_no_trace(tmp_path: Path) -> None:
    lay_out(tmp_path, "b.py", "a.py")
    first = pack(tmp_path / "a.py")
    os.utime(tmp_path / "a.py", (1, 1))
    (tmp_path / "b.py").chmod(0o600)
    assert pack(tmp_path / "a.py") == first
    assert [(m.name, m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members(first.data)] == [
        ("a.py", 0, 0, 0, "", 0o644),
        ("b.py", 0, 0, 0, "", 0o644),
    ]
    (tmp_path / "b.py").chmod(0o755)
    assert [m.mode for m in members(pack(tmp_path / "a.py").data)] == [0o644, 0o755]


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES.map(lambda n: f"m{n}.py"), st.binary(max_size=300), max_size=8))
def test_any_files_come_out_as_they_went_in_whatever_their_order(files: dict[str, bytes]) -> None:
    packed, files = [], {**files, "train.py": b"print()"}
    for order in (list(files), list(reversed(files))):
        with tempfile.TemporaryDirectory() as folder:
            for name in order:
                (Path(folder) / name).write_bytes(files[name])
            packed.append(pack(Path(folder) / "train.py"))
    assert packed[0] == packed[1]
    with tarfile.open(fileobj=io.BytesIO(packed[0].data), mode="r:gz") as archive:
        unpacked = {}
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            unpacked[member.name] = content.read()
    assert unpacked == files


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    lay_out(tmp_path, "elsewhere/shared.py", "job/train.py")
    (tmp_path / "job/shared.py").symlink_to(tmp_path / "elsewhere/shared.py")
    (tmp_path / "job/loop").symlink_to(tmp_path / "job")
    (tmp_path / "job/dangling.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "job/pipe.py")
    packed = pack(tmp_path / "job/train.py")
    assert packed.files == ("shared.py", "train.py")
    assert all(member.isreg() for member in members(packed.data))


def test_too_much_code_is_refused_with_the_biggest_files(tmp_path: Path) -> None:
    lay_out(tmp_path, "train.py")
    (tmp_path / "weights.bin").write_bytes(os.urandom(9 * 2**20))
    (tmp_path / "small.bin").write_bytes(os.urandom(2**20))
    with pytest.raises(
        BadInput, match=r"10\.0 MiB packed.*Biggest: weights\.bin \(9\.0 MiB\), small\.bin \(1\.0 MiB\)"
    ):
        pack(tmp_path / "train.py", tmp_path)
    assert pack(tmp_path / "train.py").files == ("train.py",)


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    lay_out(tmp_path, "train.py")
    with (tmp_path / "data.bin").open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(BadInput, match=r"more than 256 MiB of files\. Biggest: data\.bin"):
        pack(tmp_path / "train.py", tmp_path)


def test_a_folder_of_countless_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_bundle, "MAX_FILES", 3)
    lay_out(tmp_path, *(f"{n}.py" for n in range(5)))
    with pytest.raises(BadInput, match="more than 3 files"):
        pack(tmp_path / "1.py")


def test_scripts_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    lay_out(tmp_path, "inside/train.py", "other/x.py")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound, match=r"nope\.py is not there"):
        pack(tmp_path / "nope.py")
    with pytest.raises(BadInput, match="inside is a folder"):
        pack(tmp_path / "inside")
    with pytest.raises(BadInput, match="not a regular file"):
        pack(tmp_path / "pipe")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04\0\0")
    with pytest.raises(BadInput, match=r"model\.pt is no Python source"):
        pack(tmp_path / "model.pt")
    with pytest.raises(BadInput, match="outside --workdir"):
        pack(tmp_path / "inside/train.py", tmp_path / "other")
    with pytest.raises(NotFound, match="--workdir names"):
        pack(tmp_path / "inside/train.py", tmp_path / "gone")
    with pytest.raises(BadInput, match="cannot be read: Not a directory"):
        pack(tmp_path / "inside/train.py/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_without_permission_is_refused(tmp_path: Path) -> None:
    lay_out(tmp_path, "train.py")
    (tmp_path / "train.py").chmod(0)
    with pytest.raises(BadInput, match="Permission denied"):
        pack(tmp_path / "train.py")


def test_a_file_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    lay_out(tmp_path, "train.py")
    (tmp_path / os.fsdecode(b"\xff.py")).write_text("")
    with pytest.raises(BadInput, match="not valid UTF-8"):
        pack(tmp_path / "train.py")
