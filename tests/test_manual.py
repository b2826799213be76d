"""What the manual tells its readers to type exists: commands, their options, scripts and targets; so do its links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from atoll.cli.group import hoist
from atoll.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = [
    path
    for folder in ("atoll", "controller", "agent", "strategies")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent != ROOT / "atoll/v1"
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`((?:sudo |atoll |python |make )[^`\n]+)`")
FILLED_IN = "SOMETHING"
"""For what a program puts into its advice."""
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Told:
    """`command` is told in the file `where`."""

    where: str
    command: str

    def __str__(self) -> str:
        return f"{self.where}: {self.command}"


def parts(line: str) -> Iterator[str]:
    """The commands of a line of shell, without prompt, comment, variables before them and what goes in and out."""
    line = re.sub(r"^\s*(\$ )?", "", line)
    for part in re.split(r"\s#|\s\|\s|\s&&\s|; ", line):
        command = re.split(r"\s[<>]", part)[0].strip()
        command = re.sub(r"^(sudo |env |time |PATH=\S+ |[A-Z_]+=\S+ )+", "", command)
        if re.match(r"(atoll|python|make) \S", command):
            yield command
        elif part is line or not command:
            return


def told() -> list[Told]:
    found: dict[Told, None] = {}
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in FENCED.findall(text) for line in block.replace("\\\n", "").splitlines()]
        for line in [*lines, *QUOTED.findall(FENCED.sub("", text))]:
            found |= {Told(str(page.relative_to(ROOT)), command): None for command in parts(line)}
    for program in PROGRAMS:
        quoted = QUOTED.findall(re.sub(r'"\n\s+f?"', "", program.read_text()))
        named = [re.sub(r"\{[^}]*\}", FILLED_IN, line) for line in quoted]
        found |= {Told(str(program.relative_to(ROOT)), command): None for line in named for command in parts(line)}
    return list(found)


TOLD = told()


def check_command(command: Any, words: list[str]) -> None:
    """Raises for a command or option that is none, and for arguments that it does not take."""
    args = hoist([word.strip("[]") for word in words])  # in brackets: may be left out
    context = command.make_context("atoll", [], resilient_parsing=True)
    context.resilient_parsing = False
    while hasattr(command, "get_command") and args:
        _, rest, _ = command.make_parser(context).parse_args(args)
        if not rest or rest[0] == FILLED_IN:
            return
        command, args = command.get_command(context, rest[0]), rest[1:]
        assert command is not None, f"atoll has no command {rest[0]!r}"
        context = command.make_context(rest[0], [], resilient_parsing=True)
        context.resilient_parsing = False
    if args and args[-1] in taking_values(command):
        args = [*args, FILLED_IN]  # an option may be named alone
    _, beyond, _ = command.make_parser(context).parse_args(args)
    assert beyond == []


def taking_values(command: Any) -> set[str]:
    return {name for parameter in command.params if not getattr(parameter, "is_flag", False) for name in parameter.opts}


def check_script(words: list[str]) -> None:
    script, *args = words
    if script in ("train.py", "-m"):  # the reader's own
        return
    source = (ROOT / script).read_text()
    for option in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
        assert f'"{option}"' in source, f"{script} has no {option}"


def check(one: Told) -> None:
    program, *words = shlex.split(one.command)
    if program == "atoll":
        check_command(typer.main.get_command(app), words)
    elif program == "python":
        check_script(words)
    else:
        assert re.search(rf"^{re.escape(words[0])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), "no target"


@pytest.mark.parametrize("folder", sorted({one.where.partition("/")[0] for one in TOLD}))
def test_what_is_told_to_type_is_there(folder: str) -> None:
    wrong = []
    for one in TOLD:
        if one.where.partition("/")[0] == folder:
            try:
                check(one)
            except Exception as error:  # noqa: BLE001 - all that is wrong is told at once
                wrong.append(f"{one}: {error}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, section in LINK.findall(FENCED.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), file
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert section in slugs, f"{file}{section}"


def test_enough_is_told_for_these_tests_to_mean_anything() -> None:
    assert sum(one.command.startswith("atoll ") for one in TOLD) > 60
    assert sum(one.command.startswith("python benchmarks/") for one in TOLD) > 15


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("atoll fly", "no command 'fly'"),
        ("atoll logs JOB --bogus", "No such option"),
        ("atoll status JOB twice", "twice"),
        ("python benchmarks/controller_load.py --bogus 3", "has no --bogus"),
        ("make nothing", "no target"),
    ],
)
def test_what_is_not_there_is_found(command: str, told: str) -> None:
    with pytest.raises(Exception, match=told):
        check(Told("here", command))


def test_the_walks_of_the_architecture_lead_through_files_that_are_there() -> None:
    section = (ROOT / "docs/architecture.md").read_text().partition("## Walks\n")[2].partition("\n## ")[0]
    walks = re.findall(r"^\*\*.*?(\d+)\s+files:(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    assert len(walks) == section.count("**") / 2
    for count, walk in walks:
        stations = re.findall(r"`([^`]+/)`:([^`→]+)", walk)
        files = [ROOT / folder / name.strip(" \n.") for folder, names in stations for name in names.split(",")]
        assert [file for file in files if not file.is_file()] == []
        assert len(files) == int(count)
