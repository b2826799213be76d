"""Inputs of a job's environment, and the digest that identifies an environment. Pure."""

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
    """Inputs of an environment. Jobs with equal recipes share one."""

    requirements: tuple[str, ...]
    setup: str
    code_sha256: str
    """Digest of the job's code if requirements or setup may read it, else empty."""
    installer: Mapping[str, str]
    """The job's variables that configure package indexes."""
    base: str
    """Digest of the agent's interpreter and packages."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def recipe_of(spec: JobSpec, base: str) -> Recipe:
    """base: digest of the agent's interpreter and packages."""
    reads_code = bool(spec.setup) or not all(map(is_from_an_index, spec.requirements))
    return Recipe(
        requirements=tuple(spec.requirements),
        setup=spec.setup,
        code_sha256=spec.code_sha256 if reads_code else "",
        installer={name: value for name, value in sorted(spec.env.items()) if name.startswith(_OF_THE_INSTALLER)},
        base=base,
    )


def is_from_an_index(requirement: str) -> bool:
    """Return True if this requirement certainly names nothing in the job's code."""
    return bool(_FROM_AN_INDEX.fullmatch(requirement)) and not _ARCHIVE.fullmatch(requirement)
