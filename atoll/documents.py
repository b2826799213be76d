"""Small files that users write or pass on: read whole and within a limit; errors name the file and the next step."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from atoll.errors import BadInput, NotFound


def read_document(what: str, path: Path, max_bytes: int, *, absent: str = "Check the path", large: str) -> bytes:
    """The whole file. Raises NotFound, or BadInput where it cannot be read or is too large.

    what: the kind of file, as its users call it. absent, large: what to do where it is not there, or too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise NotFound(f"{what} {path} is not there. {absent}") from error
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}. Check the path") from error
    if len(content) > max_bytes:
        most = f"{max_bytes >> 20} MiB" if max_bytes >= 2**20 else f"{max_bytes >> 10} KiB"
        raise BadInput(f"{what} {path} is larger than {most}. {large}")
    return content


def read_toml(what: str, path: Path, max_bytes: int, *, large: str) -> tuple[dict[str, Any], str]:
    """A TOML file, and its text. Raises as read_document does, and BadInput where it is not TOML."""
    try:
        text = read_document(what, path, max_bytes, large=large).decode()
        return tomllib.loads(text), text
    except UnicodeDecodeError as error:
        raise BadInput(f"{what} {path} is not UTF-8 at byte {error.start}. Save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{what} {path} is not valid TOML: {error}. Check that line") from error
    except RecursionError as error:
        raise BadInput(f"{what} {path} is nested too deeply. A {what} is a few lines of TOML") from error
