"""Packs a script and the code beside it into the tar.gz that travels to the nodes; reads one that came from elsewhere.

Same files, same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import sys
import tarfile
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from atoll.errors import BadInput, NotFound
from atoll.network.rpc import MAX_CODE_BYTES, MAX_UNPACKED_BYTES

MAX_FILES: Final = 10_000
_MAX_FOLDERS: Final = 20_000
_LOOKED_AT: Final = 4096  # bytes of a script
_HEADER_BYTES: Final = 2048  # of a file, when unpacked
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Bundle:
    """Packed code. `script` is the path inside it that the workers run; `files` all paths, sorted."""

    data: bytes
    script: str
    files: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def pack(script: Path, workdir: Path | None = None, beside: Path | None = None) -> Bundle:
    """Pack `script` with all *.py under `beside`, which is its folder where left out, or with everything under
    `workdir`.

    Left out: hidden files and folders, __pycache__, virtual environments, node_modules, links to folders, and what is
    no regular file. Raises NotFound or BadInput naming the file, and BadInput with the biggest files when the result
    exceeds 8 MiB.
    """
    _check_script(script)
    root = (workdir or beside or script.parent).resolve()
    if not root.is_dir():
        raise NotFound(f"folder {workdir} is not there. --workdir names the folder that holds the code")
    # Resolved without the last part: a script may be a link to a file elsewhere and still be run under its own name.
    placed = script.parent.resolve() / script.name
    if not placed.is_relative_to(root):
        raise BadInput(f"script {script} lies outside --workdir {workdir}. Name a folder that contains it")
    wanted = {placed, *_walk(root, only_python=workdir is None)}
    sizes = {_inner_name(path, root): _size(path) for path in wanted}
    names = sorted(sizes)
    if sum(sizes.values()) > MAX_UNPACKED_BYTES:
        raise _too_big(f"more than {MAX_UNPACKED_BYTES >> 20} MiB of files", sizes, root)
    data = _tar_gz(root, names)
    if len(data) > MAX_CODE_BYTES:
        raise _too_big(f"{len(data) / 2**20:.1f} MiB packed, the limit is {MAX_CODE_BYTES >> 20} MiB", sizes, root)
    return Bundle(data, _inner_name(placed, root), tuple(names))


def members(code: bytes) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The files and folders of a bundle that came from elsewhere, one after the other, each with its archive.

    Raises BadInput for a path that leads out, for what is neither file nor folder, and for more than a bundle may
    unpack to; what tarfile and gzip raise for what is no tar.gz."""
    bytes_left = MAX_UNPACKED_BYTES
    # As a stream, so that no header can lead backwards for ever.
    with tarfile.open(fileobj=_BoundedGzip(code), mode="r|") as archive:
        for count, member in enumerate(archive):
            bytes_left -= member.size
            if bytes_left < 0 or count >= MAX_FILES:
                raise _too_much()
            if member.size < 0:
                raise BadInput(f"the code bundle has {member.name[:80]!r} with {member.size} bytes. Send it anew")
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise BadInput(f"the code bundle has {member.name!r}: only files and folders inside it are allowed")
            yield archive, member


class _BoundedGzip(io.RawIOBase):
    """Reader of a gzip, up to a limit: the headers of a small tar may claim gigabytes too, and are read whole."""

    def __init__(self, code: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(code))
        self._left = MAX_UNPACKED_BYTES + MAX_FILES * _HEADER_BYTES

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise _too_much()
        return data


def _too_much() -> BadInput:
    return BadInput(
        f"the code bundle unpacks to more than {MAX_UNPACKED_BYTES} bytes or {MAX_FILES} files. Leave data out of it"
    )


def _check_script(script: Path) -> None:
    try:
        mode = script.stat().st_mode
        if stat.S_ISDIR(mode):
            raise BadInput(f"script {script} is a folder. Name the Python file in it that starts the training")
        if not stat.S_ISREG(mode):
            raise BadInput(f"script {script} is not a regular file. Name a Python file")
        source = script.read_bytes()
        if b"\0" in source[:_LOOKED_AT]:
            raise BadInput(f"script {script} is no Python source: it has binary data. Name a Python file")
        _check_syntax(script, source)
    except FileNotFoundError as error:
        raise NotFound(f"script {script} is not there. Check the path; the working folder is {Path.cwd()}") from error
    except OSError as error:
        raise BadInput(f"script {script} cannot be read: {error.strerror}. Check its permissions") from error


def _check_syntax(script: Path, source: bytes) -> None:
    """Raises BadInput, with the line and a caret as its note, for what every worker would fail with."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        python = ".".join(map(str, sys.version_info[:2]))
        where = f"script {script}" + (f", line {error.lineno}" if error.lineno else "")
        refused = BadInput(f"{where}: {error.msg}, says Python {python} here. Mend it and submit again")
        _, *excerpt, _ = traceback.format_exception_only(error)
        refused.add_note(textwrap.dedent("".join(excerpt)).rstrip())
        raise refused from error
    except (MemoryError, RecursionError, ValueError):
        return  # too deep for the compiler here; the workers' one may say more


def _walk(root: Path, *, only_python: bool) -> Iterator[Path]:
    """Every file that belongs to the bundle, in no order."""
    found = 0
    for visited, (folder, folders, files) in enumerate(os.walk(root)):
        if visited > _MAX_FOLDERS:
            raise BadInput(f"{root} holds more than {_MAX_FOLDERS} folders. Put the script in a folder of its own")
        folders[:] = [name for name in folders if _is_code_folder(Path(folder, name))]
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or (only_python and not name.endswith(".py")) or not path.is_file():
                continue
            found += 1
            if found > MAX_FILES:
                raise BadInput(f"{root} holds more than {MAX_FILES} files to ship. Put the code in a folder of its own")
            yield path


def _is_code_folder(folder: Path) -> bool:
    return not (
        folder.name.startswith(".")
        or folder.name in _SKIPPED_FOLDERS
        or folder.is_symlink()
        or (folder / "pyvenv.cfg").exists()
    )


def _inner_name(path: Path, root: Path) -> str:
    name = PurePosixPath(path.relative_to(root)).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"file name {name!r} is not valid UTF-8. Rename it") from error
    return name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}. Check its permissions, or move it away") from error


def _tar_gz(root: Path, names: Sequence[str]) -> bytes:
    """Owner, time and order are fixed; of the mode only whether it may be executed."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, filename="", mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            path = root / name
            try:
                content, executable = path.read_bytes(), path.stat().st_mode & stat.S_IXUSR
            except OSError as error:
                raise BadInput(
                    f"{path} cannot be read: {error.strerror}. Check its permissions, or move it away"
                ) from error
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), 0, 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _too_big(cause: str, sizes: dict[str, int], root: Path) -> BadInput:
    from humanize import naturalsize

    biggest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:5]
    listed = ", ".join(f"{name} ({naturalsize(size, binary=True)})" for name, size in biggest)
    return BadInput(
        f"the code in {root} is too big: {cause}. Biggest: {listed}. "
        "Ship code only: keep data on the nodes, or name a smaller folder with --workdir"
    )
