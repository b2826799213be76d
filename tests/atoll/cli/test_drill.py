from __future__ import annotations

import pytest
from typer.testing import CliRunner

from atoll.cli.commands import drill
from atoll.cli.main import app
from atoll.drill.schedule import KINDS


def test_all_kinds_are_struck_where_none_is_named() -> None:
    assert drill._ALL.split(",") == list(KINDS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--strategy", "sparse"), "stale-sparse"),
        (("--kinds", "workers,meteors"), "meteors"),
        (("--nodes", "3", "--workers", "4"), "at most one each"),
        (("--script", "train.py"), "--epochs"),
        (("--epochs", "3"), "--script"),
        (("--every", "1"), "5 s"),
        (("--minutes", "nan"), "fit twice"),
        (("--step", "nan"), "60 seconds"),
    ],
)
def test_what_cannot_be_drilled_is_refused_before_anything_starts(
    runner: CliRunner, arguments: tuple[str, ...], word: str
) -> None:
    result = runner.invoke(app, ["drill", *arguments])
    assert result.exit_code == 2, result.output
    assert word in result.stderr
