"""Reads what users write or pass on: small files, whole and within a limit; errors name file, field and next step."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, get_args, get_origin, get_type_hints

from atoll.errors import BadInput, NotFound

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_UNKNOWN: Final = ("extra_forbidden", "unexpected_keyword_argument")  # of models, of data classes
_BRANCHES: Final = frozenset({"int", "str", "float", "[key]"})
"""Parts that pydantic adds to the path of a field: the branch of a union that it tried, the name in a mapping."""
_WORDS: Final = (("input ", "it "), ("valid tuple", "list"), ("valid dictionary", "table"))


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what pydantic checks a type with. It is built when first used: no process uses those of all types."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


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
        from humanize import naturalsize

        raise BadInput(f"{what} {path} is larger than {naturalsize(max_bytes, binary=True)}. {large}")
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
    """Return the line of a field in TOML text, which tomllib does not give; None if it cannot be found, e.g. across
    lines."""
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


def explain(schema: type, errors: Sequence[ErrorDetails]) -> str:
    """Return pydantic's first error as a sentence that names the field, its value and what is right.

    schema: a model or dataclass, with aliases where the document has other names."""
    error = next((each for each in errors if each["type"] in _UNKNOWN), errors[0])
    path, known, inside = "", _fields(schema), False
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in known or (part not in _BRANCHES and (inside or part is error["loc"][-1])):
            path += f".{part or repr(part)}"
            annotation = None if part not in known and error["type"] in _UNKNOWN else known.get(part)
            inside = _has_keys(annotation)
            within = [_fields(each) for each in _schemas(annotation)] if annotation else []
            known = {name: each for fields in within for name, each in fields.items()} or known
    path = path.lstrip(".")
    match error["type"]:
        case "missing":
            return f"field '{path}' is missing. Add it"
        case "value_error":
            value = f"= {error['input']!r} " if isinstance(error["input"], (str, int, float)) else ""
            return f"{path} {value}{error['ctx']['error']}".lstrip()
        case kind if kind in _UNKNOWN:
            return unknown_field(path, str(error["loc"][-1]), known)
    return wrong_value(path, error)


def _fields(schema: Any) -> dict[str, Any]:
    """Types of the fields, by the name that documents have."""
    if hasattr(schema, "model_fields"):
        return {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: each for name, each in get_type_hints(schema).items() if get_origin(each) is not ClassVar}


def _has_keys(annotation: Any) -> bool:
    """Return True if a field's type includes a mapping, whose keys are part of the path."""
    return get_origin(annotation) in (dict, Mapping) or any(map(_has_keys, get_args(annotation)))


def _schemas(annotation: Any) -> Iterator[type]:
    """The models that a field's type speaks of."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for each in get_args(annotation):
        yield from _schemas(each)


def unknown_field(field: str, name: str, known: Iterable[str]) -> str:
    """field: the whole path, whose last part is `name`."""
    return f"unknown field '{field}'. {did_you_mean(name, known, alike=0.5)}"


def wrong_value(field: str, error: ErrorDetails) -> str:
    """Return pydantic's error about a value as a sentence about the field."""
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
