"""What the manual tells its readers to type exists: commands, their options, scripts and targets; so do its links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from source_tree import ROOT, text_of

from atoll.cli.group import hoist
from atoll.cli.main import app

MANUAL = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = (*MANUAL, ROOT / "CHANGELOG.md")
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
MAX_README_LINES = 130
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
MAX_PICTURE_BYTES = 60_000
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
    for part in re.split(r"\s#|\s\|\s|\s&&\s|; |\s&$", line):
        command = re.split(r"\s[<>]", part)[0].strip()
        command = re.sub(r"^(sudo |env |time |PATH=\S+ |[A-Z_]+=\S+ )+", "", command)
        if re.match(r"(atoll|python|make) \S", command):
            yield command
        elif part is line or not command:
            return


def told() -> list[Told]:
    found: dict[Told, None] = {}
    for page in MANUAL:
        text = page.read_text()
        lines = [line for block in FENCED.findall(text) for line in block.replace("\\\n", "").splitlines()]
        for line in [*lines, *QUOTED.findall(FENCED.sub("", text))]:
            found |= {Told(str(page.relative_to(ROOT)), command): None for command in parts(line)}
    for program in PROGRAMS:
        quoted = QUOTED.findall(re.sub(r'"\n\s+f?"', "", text_of(program)))
        named = [re.sub(r"\{[^}]*\}", FILLED_IN, line) for line in quoted]
        found |= {Told(str(program.relative_to(ROOT)), command): None for line in named for command in parts(line)}
    return list(found)


TOLD = told()
COMMAND = typer.main.get_command(app)  # takes a quarter of a second


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
        check_command(COMMAND, words)
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


def test_the_readme_is_short() -> None:
    """It is read to its end, and pasted into a shell (tests/e2e/test_pasted_commands.py)."""
    assert (ROOT / "README.md").read_text().count("\n") <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, section in LINK.findall(FENCED.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), file
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert section in slugs, f"{file}{section}"


def test_pictures_are_small_and_shown_and_say_what_they_show() -> None:
    shown = {}
    for page in PAGES:
        for words, file in PICTURE.findall(page.read_text()):
            shown[(page.parent / file).resolve()] = words
    assert set(shown) == set((ROOT / "docs/images").iterdir())
    assert [file.name for file in shown if file.stat().st_size > MAX_PICTURE_BYTES] == []
    assert [file.name for file, words in shown.items() if len(words) < 20] == []


def test_every_page_is_in_the_site_s_contents_and_no_other() -> None:
    contents = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.md)$", contents, re.MULTILINE)
    assert sorted(listed) == sorted(["index.md" if page.name == "README.md" else page.name for page in PAGES])


def test_lists_are_seen_as_such() -> None:
    """The site's Markdown wants an empty line before a list; elsewhere it may be left out."""
    wrong = []
    for page in PAGES:
        lines = FENCED.sub("", page.read_text()).splitlines()
        for before, line in pairwise(lines):
            begins = re.match(r"(- |\d+\. )\S", line)
            if begins and before and not re.match(r"(- |\d+\. | )", before):
                wrong.append(f"{page.name}: {line}")
    assert wrong == []


@pytest.mark.timeout(180)
def test_the_manual_builds_as_a_site_without_a_warning(tmp_path: Path) -> None:
    """All of its links and anchors once more, as the site has them; and the pages from outside of docs/."""
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path))
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    index = (tmp_path / "index.html").read_text()
    assert 'src="images/architecture.svg"' in index
    assert 'href="deploy.html#clients"' in index
    assert (tmp_path / "tree/examples/words.py").read_text() == (ROOT / "examples/words.py").read_text()
    asked = re.findall(r"""(?:src|href)=["'](https?://[^"']+\.(?:js|css|woff2?))["']""", index)
    assert asked == [], "a site that is read without a network asks one for these"


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
