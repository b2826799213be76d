"""Things that a job's environment is made from, and the digest that tells environments apart. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from atoll.v1.common_pb2 import JobSpec

_FROM_AN_INDEX: Final = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*([<>=!~;(].*|@\s*(git\+)?https?://.*)?"
)
_ARCHIVE: Final = re.compile(r"[^\s;]+\.(whl|zip|gz|bz2|xz|tar|tgz)")
_OF_THE_INSTALLER: Final = ("PIP_", "UV_")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Two jobs with equal ones share an environment."""

    requirements: tuple[str, ...]
    setup: str
    code_sha256: str
    """Of the job's code, where any of this may read it; else empty: other code needs no other environment."""
    installer: Mapping[str, str]
    """The job's variables that say where packages come from."""
    base: str
    """Digest of the interpreter and the packages that the agent has."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def recipe_of(spec: JobSpec, base: str) -> Recipe:
    """base: digest of what the agent has."""
    reads_code = bool(spec.setup) or not all(map(is_from_an_index, spec.requirements))
    return Recipe(
        requirements=tuple(spec.requirements),
        setup=spec.setup,
        code_sha256=spec.code_sha256 if reads_code else "",
        installer={name: value for name, value in sorted(spec.env.items()) if name.startswith(_OF_THE_INSTALLER)},
        base=base,
    )


def is_from_an_index(requirement: str) -> bool:
    """Whether this line of a requirements file names nothing in the job's code for sure."""
    return bool(_FROM_AN_INDEX.fullmatch(requirement)) and not _ARCHIVE.fullmatch(requirement)
