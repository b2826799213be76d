"""What users write or pass on: small files are read whole and within a limit; errors name file, field and next step."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.errors import BadInput, NotFound

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS: Final = (("input ", "it "), ("valid tuple", "list"), ("valid dictionary", "table"))


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


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """Where a field stands in TOML text (tomllib does not tell). None where it cannot be found, e.g. across lines."""
    best, section = None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+", line):
            section = header[1].replace('"', "").replace("'", "")
            if section == ".".join(keys[: section.count(".") + 1]) and best is None:
                best = number
        elif assignment := re.match(r"""\s*["']?([\w.-]+?)["']?\s*=""", line):
            path = f"{section}.{assignment[1]}".lstrip(".")
            if path == ".".join(keys):
                return number
            if path == keys[0]:
                best = number
    return best


def unknown_field(field: str, name: str, known: Iterable[str]) -> str:
    """field: the whole path, whose last part is `name`."""
    return f"unknown field '{field}'. {did_you_mean(name, known, alike=0.5)}"


def wrong_value(field: str, error: ErrorDetails) -> str:
    """What pydantic says of a value, as a sentence about the field."""
    given = repr(error["input"])
    shown = given if len(given) <= 80 else given[:77] + "..."
    cause = error["msg"][0].lower() + error["msg"][1:]
    for pydantics, tomls in _WORDS:
        cause = cause.replace(pydantics, tomls)
    return f"{field} = {shown} is wrong: {cause}"


def did_you_mean(name: str, known: Iterable[str], *, alike: float = 0.6) -> str:
    """The next step for a name that there is not. alike: from 0 to 1, how near one must come to be meant."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=alike)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(names)}"
