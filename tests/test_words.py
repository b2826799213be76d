"""Words of the project: the glossary against the tree, first words of docstrings, sentences of the manual."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from source_tree import ROOT, nodes, text_of

ROOMS = ("agent", "atoll", "controller", "kernels", "protos", "strategies")
SCRIPTS = ("benchmarks", "examples")
GLOSSARY = ROOT / "docs/glossary.md"
CODE = {".py", ".pyi", ".proto", ".hpp", ".cpp", ".cu", ".cuh"}
PREPOSITIONS = (
    "About Above Across After Against Among At Before Behind Below Beside Besides Between Beyond By Despite During For "
    "From In Inside Instead Into Like Of On Onto Out Outside Over Per Since Than Through To Toward Under Until Up Upon "
    "Via With Within Without"
)
QUESTIONS = (
    "How However That What Whatever When Whenever Where Wherever Whether Which Whichever Who Whoever Whom Whose Why"
)
CONJUNCTIONS = "And As Because But If Nor Once Or So Though Unless While"
PRONOUNS = "He His It Its Nobody Somebody Someone Their They Those"
NO_OPENING = {word.lower() for words in (PREPOSITIONS, QUESTIONS, CONJUNCTIONS, PRONOUNS) for word in words.split()}
"""A docstring begins with a verb ("Return…", "Sends…") or with a noun ("Cache of…"), so not with one of these words."""

MAX_SENTENCE_WORDS = 20.0
"""Words of a sentence of the manual, on average of a page."""

RECORDED: dict[str, set[str]] = {}
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


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of modules, classes and functions, and of attributes where it takes more than one line."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(node.body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (found := string_of(after)) and "\n" in found[1]:
                    yield found
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body
        if documented and (found := string_of(documented[0])):
            yield found


def string_of(statement: ast.stmt) -> tuple[int, str] | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        text = statement.value.value
        return (statement.lineno, text.strip()) if isinstance(text, str) and text.strip() else None
    return None


def opens_badly(docstring: str) -> bool:
    """Judge the first word; an argument's name ("of: the tensors") may be any word."""
    first = re.match(r"\W*([A-Za-z]+)(?![\w.]*[:,])", docstring)
    return bool(first and first[1].lower() in NO_OPENING) or docstring.lower().startswith("the same,")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]!r}"
        for path in sources(ROOMS)
        if path.suffix == ".py"
        for line, text in docstrings(path)
        if opens_badly(text)
    ]
    assert wrong == [], "\n".join(["", *wrong])


@pytest.mark.parametrize(
    ("docstring", "bad"),
    [
        ("Return the agreed state.", False),
        ("Cache of plans.", False),
        ("of, upto: the steps to look at.", False),
        ("Of one tensor.", True),
        ("What holds now.", True),
        ("(Whether) it runs.", True),
        ("The same, for many.", True),
        ("The same plan for all.", False),
    ],
)
def test_an_opening_is_judged_by_its_first_word(docstring: str, bad: bool) -> None:
    assert opens_badly(docstring) is bad


def prose(page: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, without code, tables and headings."""
    page = re.sub(r"^```.*?^```", "", re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL), flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", page):
        lines = [line.strip() for line in block.splitlines() if not re.match(r"\s*[|#]", line)]
        if lines:
            yield " ".join(lines)


def sentence_lengths(page: str) -> list[int]:
    """Words of each sentence; `code` counts as one word, and so does the text of a link."""
    found = []
    for paragraph in prose(page):
        text = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", paragraph))
        sentences = re.split(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z*\[\d\"(])", text)
        found += [len(sentence.split()) for sentence in sentences if re.search("[A-Za-z]", sentence)]
    return found


def test_sentences_are_counted_without_code_and_tables() -> None:
    page = (
        "# A title\n\nOne two. Three `four five`\nsix.\n\n```\nno words here\n```\n\n| a | b |\n\n- seven eight\n- nine"
    )
    assert sentence_lengths(page) == [2, 3, 3, 2]


def test_sentences_of_the_manual_are_short() -> None:
    average = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lengths = sentence_lengths(path.read_text())
        average[str(path.relative_to(ROOT))] = sum(lengths) / len(lengths)
    long = [f"{page}: {words:.1f} words a sentence" for page, words in average.items() if words > MAX_SENTENCE_WORDS]
    assert long == [], "\n".join(["", *long])
