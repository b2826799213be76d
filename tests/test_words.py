"""The words of the project: docs/glossary.md against the tree, and the first words of module docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from source_tree import ROOT, text_of

ROOMS = ("agent", "atoll", "controller", "kernels", "protos", "strategies")
SCRIPTS = ("benchmarks", "examples")
GLOSSARY = ROOT / "docs/glossary.md"
CODE = {".py", ".pyi", ".proto", ".hpp", ".cpp", ".cu", ".cuh"}
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"}

RECORDED: dict[str, set[str]] = {
    "agent/runtime/checkpoints/memory/shards/shard_state.py": {"owed"},
    "strategies/shared_masters/residuals.py": {"held back", "owed"},
}
"""Retired words in names that files of users have: they stay as long as those are read."""


def table(section: str) -> list[list[str]]:
    """The rows of the first table under a heading, cell by cell."""
    text = GLOSSARY.read_text().partition(f"# {section}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows, section
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows[0].splitlines()[2:]]


def sources(folders: Iterable[str]) -> Iterator[Path]:
    for folder in folders:
        found = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in CODE)
        yield from (path for path in found if path.parent != ROOT / "atoll/v1")


@cache
def parts(name: str) -> list[str]:
    """`ReplicaSender`, `replica_sender` -> replica, sender."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name.replace("_", " "))


def test_every_term_is_listed_once_and_lives_where_the_glossary_says() -> None:
    rows = table("Glossary")
    terms = [term for row in rows for term in row[0].split(", ")]
    assert len(set(terms)) == len(terms)
    gone = [f"{row[0]}: {place}" for row in rows for place in re.findall(r"`([^`]+)`", row[2]) if not exists(place)]
    assert gone == []
    assert [row[0] for row in rows if not re.fullmatch(r"`[^`]+`", row[2])] == []


def exists(place: str) -> bool:
    path = ROOT / place
    return path.is_dir() if place.endswith("/") else path.is_file()


@dataclass(frozen=True)
class Use:
    """A retired word in line `line` of a file."""

    path: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}"


def retired() -> dict[str, list[str]]:
    """Words by where they may not be: anywhere, names, modules, classes."""
    found: dict[str, list[str]] = {}
    for words, where, _ in table("Retired"):
        found.setdefault(where, []).extend(words.split(", "))
    return found


def test_retired_words_are_gone() -> None:
    words = retired()
    assert set(words) == {"anywhere", "names", "modules", "classes"}
    manual = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    uses = [use for path in [*sources([*ROOMS, *SCRIPTS]), *manual] if path != GLOSSARY for use in written(path, words)]
    left = [str(use) for use in uses if use.word not in allowed(use.path)]
    assert left == [], "\n".join(["", *left])


def allowed(path: str) -> set[str]:
    return {word for where, words in RECORDED.items() if path.startswith(where) for word in words}


def written(path: Path, words: dict[str, list[str]]) -> Iterator[Use]:
    name, text = str(path.relative_to(ROOT)), text_of(path)
    # Words that follow each other are also found across an underscore, a hyphen or the end of a comment's line.
    lower = text.lower()  # looking through it for each pattern takes long
    near = [word for word in words["anywhere"] if all(part in lower for part in word.split())]
    patterns = {word: r"(?<![a-z])" + r"[\s_#/*-]+".join(word.split()) + r"(?![a-z])" for word in near}
    for word, pattern in patterns.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            yield Use(name, text.count("\n", 0, found.start()) + 1, word)
    if path.suffix not in CODE:
        return
    yield from (Use(name, 1, word) for word in words["modules"] if word in parts(path.stem))
    yield from (Use(name, 1, word) for word in words["names"] if word in parts(path.stem))
    named: Iterable[tuple[int, str, bool]] = native_names(text)
    if path.suffix in {".py", ".pyi"}:
        may_be_named = rf"{'|'.join(words['names'])}|class \w*({'|'.join(words['classes'])})"
        named = python_names(text) if re.search(may_be_named, text, re.IGNORECASE) else ()  # parsing takes long
    for line, identifier, is_class in named:
        of_it = {part.lower() for part in parts(identifier)}
        forbidden = [*words["names"], *(words["classes"] if is_class else [])]
        yield from (Use(name, line, word) for word in forbidden if word in of_it)


def python_names(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether it is a class's) of classes, functions and their arguments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False


def native_names(text: str) -> Iterator[tuple[int, str, bool]]:
    """As `python_names`, of C++ and protos: classes, structures and messages."""
    for found in re.finditer(r"^\s*(?:class|struct|enum class|enum|message) (\w+)", text, re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 1, found[1], True


def test_module_docstrings_begin_with_a_verb_or_a_noun() -> None:
    asking = []
    for path in sources([*ROOMS, *SCRIPTS]):
        if path.suffix == ".py":
            first = re.match(r"(?:#.*\n|\s)*r?\"\"\"\s*(\S+)", text_of(path))
            if first and first[1] in QUESTIONS:
                asking.append(f"{path.relative_to(ROOT)}: {first[1]}")
    assert asking == [], "\n".join(["", *asking])
