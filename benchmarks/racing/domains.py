"""The domains of island-lm: text of Debian's packages and of Python's standard library, fetched when first asked for.

None of it is in the repository: the packages come by `apt-get download`, and what is cut from them lies in the user's
cache folder."""

from __future__ import annotations

import gzip
import os
import random
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

TRAIN_BYTES: Final = 4_000_000
HELD_OUT_BYTES: Final = 120_000
DOMAINS: Final = ("en", "de", "fr", "py")
Text = npt.NDArray[np.uint8]


def domain(name: str) -> tuple[Text, Text]:
    """What is trained on and what is held out, split by document: uint8 [<= TRAIN_BYTES], uint8 [HELD_OUT_BYTES].

    Raises SystemExit where a package cannot be fetched."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atoll-benchmarks"
    path = folder / f"island-lm-{name}.npz"
    if not path.exists():
        documents = list(_DOCUMENTS[name]())
        random.Random(0).shuffle(documents)
        held_out, train = _cut(documents)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            np.savez_compressed(Path(scratch, path.name), train=train, held_out=held_out)
            os.replace(Path(scratch, path.name), path)
    with np.load(path) as stored:
        return stored["train"], stored["held_out"]


def _cut(documents: list[bytes]) -> tuple[Text, Text]:
    """The first documents are held out, the ones after them are trained on."""
    taken, size = 0, 0
    while size < HELD_OUT_BYTES:
        size += len(documents[taken]) + 1
        taken += 1
    held_out = b"\n".join(documents[:taken])[:HELD_OUT_BYTES]
    train = b"\n".join(documents[taken:])[:TRAIN_BYTES]
    return np.frombuffer(held_out, np.uint8), np.frombuffer(train, np.uint8)


def _unpacked(package: str) -> Iterator[Path]:
    """The files of a Debian package, while the iterator lives."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(
                ["apt-get", "download", "-q", package], cwd=scratch, check=True, capture_output=True, timeout=300
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", b"") or b""
            raise SystemExit(
                f"island-lm needs Debian's package {package}, which could not be fetched: {error} "
                f"{said.decode(errors='replace').strip()[-200:]}. Run apt-get update on a Debian machine"
            ) from error
        (archive,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "files"], cwd=scratch, check=True, timeout=300)
        yield from sorted(Path(scratch, "files").rglob("*"))


def _dictionary() -> Iterator[bytes]:
    """Webster 1913, about 4 kB of entries a document."""
    for path in _unpacked("dict-gcide"):
        if path.name.endswith(".dict.dz"):
            entries = re.split(rb"\n(?=\S)", gzip.decompress(path.read_bytes()))
            for start in range(0, len(entries), 16):
                yield b"\n".join(entries[start : start + 16])


def _manual(package: str) -> Iterator[bytes]:
    for path in _unpacked(package):
        if path.suffix == ".gz" and "/man/" in str(path) and not path.is_symlink():
            yield gzip.decompress(path.read_bytes())


def _standard_library() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            yield path.read_bytes()


_DOCUMENTS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "en": _dictionary,
    "de": lambda: _manual("manpages-de"),
    "fr": lambda: _manual("manpages-fr"),
    "py": _standard_library,
}
