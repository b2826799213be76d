"""The commands of README.md and docs/jobs.md, pasted in order into one shell of a machine with nothing on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import own_loopback
import pytest
from own_loopback import OwnLoopback
from source_tree import ROOT

pytestmark = [
    pytest.mark.skipif(own_loopback.why_not() != "", reason=own_loopback.why_not()),
    pytest.mark.timeout(600),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_PASTED = {
    "make setup": "it makes the environment that this test has on PATH, and every `make test` begins with it",
    ". .venv/bin/activate": "the test puts that environment on PATH",
    "make demo": "tests/benchmarks/test_examples.py runs what it runs",
}
"""Lines of README.md that are not pasted, with the reason."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[OwnLoopback]:
    with OwnLoopback(tmp_path) as machine:
        yield machine


def blocks(page: str) -> list[str]:
    return [text for language, text in BLOCK.findall((ROOT / page).read_text()) if not language]


def command(line: str) -> str:
    return line.partition("  #")[0].rstrip()


def shell(*parts: str) -> str:
    """Return a script that ends at the first failure, and then ends what it left in the background."""
    return "\n".join(("set -e", "trap 'kill $(jobs -p) 2>/dev/null || :; wait' EXIT", "exec < /dev/null", *parts))


def with_second_machine(line: str) -> str:
    """Return the line, and behind it what is typed for a second machine: another name, and a home of its own."""
    if "node-a" not in line:
        return line
    home = "HOME=$HOME/second " if "atoll agent" in line else ""
    return f"{line}\n{home}{line.replace('node-a', 'node-b')}"


def test_what_is_not_pasted_is_in_the_readme() -> None:
    lines = [command(line) for block in blocks("README.md") for line in block.splitlines()]
    assert set(NOT_PASTED) <= set(lines)


def test_the_readme_works_when_it_is_pasted(machine: OwnLoopback) -> None:
    """1. The blocks run in one shell, in order; it ends at the first command that fails. `head.lab` is this machine.
    What is typed on one machine with devices is typed for two. 2. Every job that was run is done."""
    lines = [line for block in blocks("README.md") for line in block.splitlines() if command(line) not in NOT_PASTED]
    script = "\n".join(map(with_second_machine, lines)).replace("head.lab", "localhost")
    pasted = machine.run("bash", "-c", shell(script), timeout_s=540)
    assert pasted.returncode == 0, f"{pasted.stdout}{pasted.stderr}"
    runs = re.findall(r"^atoll run ", script, re.MULTILINE)
    done = re.findall(r"^train-\w+ done: step 320 ", pasted.stderr, re.MULTILINE)
    assert (len(runs), len(done)) == (4, 4), pasted.stderr


def test_the_commands_of_the_page_on_jobs_work_when_pasted(machine: OwnLoopback) -> None:
    """On four agents, with a script, a module and a job file of those names."""
    (machine.home / "package").mkdir()
    for script in ("train.py", "package/train.py"):
        (machine.home / script).write_text("import sys\nprint('arguments', *sys.argv[1:])\n")
    (machine.home / "job.toml").write_text('script = "train.py"\nargs = ["--lr", "0.3"]\n')
    first, *_ = blocks("docs/jobs.md")
    pasted = machine.run("bash", "-c", shell("atoll up --agents 4 --detach", first, "atoll jobs --all --json"))
    assert pasted.returncode == 0, f"{pasted.stdout}{pasted.stderr}"
    assert len(re.findall(r'"id": "train-', pasted.stdout)) == len(first.splitlines()) == 4
    assert "[0] arguments --lr 0.1" in pasted.stderr
