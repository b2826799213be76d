"""The code bundle of a job: a tar.gz, checked before it is kept."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import Final

from atoll.controller.state.records import Spec
from atoll.errors import BadInput
from atoll.rpc import MAX_CODE_BYTES

MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
MAX_FILES: Final = 10_000


def check_bundle(spec: Spec, code: bytes) -> None:
    """Raises BadInput unless `code` is the tar.gz that `spec` names, holds its script and stays inside its folder."""
    if len(code) > MAX_CODE_BYTES:
        raise BadInput(f"the code bundle has {len(code)} bytes, more than {MAX_CODE_BYTES}. Leave data out of it")
    digest = hashlib.sha256(code).hexdigest()
    if digest != spec.code_sha256:
        raise BadInput(
            f"the code bundle's SHA-256 is {digest}, not spec.code_sha256 = {spec.code_sha256}. Send it anew"
        )
    try:
        names = _file_names(code)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise BadInput(f"the code bundle is not a readable tar.gz: {error}. Send it anew") from error
    if spec.script not in names:
        some = ", ".join(sorted(name for name in names if name.endswith(".py"))[:5]) or "no Python file"
        raise BadInput(
            f"spec.script = {spec.script!r} is not in the code bundle, which has {some}. Give its path there"
        )


def _file_names(code: bytes) -> set[str]:
    names: set[str] = set()
    bytes_left = MAX_UNPACKED_BYTES
    with tarfile.open(fileobj=io.BytesIO(code), mode="r:gz") as archive:
        for count, member in enumerate(archive):
            bytes_left -= member.size
            if bytes_left < 0 or count >= MAX_FILES:
                raise BadInput(
                    f"the code bundle unpacks to more than {MAX_UNPACKED_BYTES} bytes or {MAX_FILES} files. "
                    "Leave data out of it"
                )
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise BadInput(f"the code bundle has {member.name!r}: only files and folders inside it are allowed")
            if member.isfile():
                names.add(str(path))
    return names
