from __future__ import annotations

import gzip
import hashlib
import io
import tarfile

import pytest
from made import spec

from atoll.controller.jobs.records.code_bundles import check_bundle
from atoll.errors import BadInput
from atoll.network.rpc import MAX_CODE_BYTES


def pack(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def member(name: str, size: int = 3, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, link
    return made


def check(code: bytes, script: str = "train.py") -> None:
    check_bundle(spec(script=script, code_sha256=hashlib.sha256(code).hexdigest()), code)


def test_a_bundle_with_its_script_is_good() -> None:
    check(pack(member("./train.py"), member("data", 0, tarfile.DIRTYPE)))
    check(pack(member("src/deep/train.py")), "src/deep/train.py")


def test_a_missing_script_is_named_with_what_is_there() -> None:
    with pytest.raises(BadInput, match=r"spec.script = 'train.py' is not in the code bundle, which has main.py"):
        check(pack(member("main.py"), member("README")))


def test_another_digest_is_refused() -> None:
    with pytest.raises(BadInput, match="SHA-256"):
        check_bundle(spec(), pack(member("train.py")))


@pytest.mark.parametrize("code", [b"", b"not a tar", gzip.compress(b"not a tar"), pack(member("train.py"))[:-20]])
def test_what_is_no_tar_gz_is_refused(code: bytes) -> None:
    with pytest.raises(BadInput, match="code bundle"):
        check(code)


@pytest.mark.parametrize(
    "evil",
    [
        member("../x.py"),
        member("/etc/x.py"),
        member("link", 0, tarfile.SYMTYPE, "/etc"),
        member("link", 0, tarfile.LNKTYPE, "train.py"),
        member("pipe", 0, tarfile.FIFOTYPE),
    ],
)
def test_what_reaches_outside_is_refused(evil: tarfile.TarInfo) -> None:
    with pytest.raises(BadInput, match="only files and folders inside it are allowed"):
        check(pack(member("train.py"), evil))


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.jobs.code_bundle.MAX_UNPACKED_BYTES", 2**20)
    with pytest.raises(BadInput, match="unpacks to more than"):
        check(pack(member("train.py"), member("zeros", 2**20)))


def test_a_large_bundle_is_refused() -> None:
    with pytest.raises(BadInput, match="more than 8388608"):
        check(bytes(MAX_CODE_BYTES + 1))


def test_a_header_that_claims_gigabytes_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """tarfile reads an extended header into memory before it gives its member: zeros that pack to kilobytes."""
    monkeypatch.setattr("atoll.jobs.code_bundle.MAX_UNPACKED_BYTES", 2**20)
    header = member("pax", 64 * 2**20, tarfile.XHDTYPE).tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(BadInput, match="unpacks to more than"):
        check(gzip.compress(header + bytes(64 * 2**20), compresslevel=1))


def test_a_member_of_negative_size_leads_nowhere() -> None:
    """Followed backwards, it would be read again and again, or make room for more than the limit."""
    for size in (-512, -1024, -(2**40)):
        with pytest.raises(BadInput, match="code bundle"):
            check(gzip.compress(member("train.py", size).tobuf(tarfile.GNU_FORMAT) + bytes(1024)))
