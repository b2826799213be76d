from __future__ import annotations

import pytest

from drill.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--strategy", "sparse"), "stale-sparse"),
        (("--kinds", "workers,meteors"), "meteors"),
        (("--nodes", "3", "--workers", "4"), "at most one each"),
        (("--nodes", "17"), "from 2 to 16"),
        (("--controllers", "0"), "from 1 to 5"),
        (("--every", "1"), "5 s"),
        (("--minutes", "nan"), "fit twice"),
        (("--step", "nan"), "60 seconds"),
    ],
)
def test_what_cannot_be_drilled_is_refused_before_anything_starts(
    arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as refused:  # by argparse itself
        code = refused.code
    assert (code, word in capsys.readouterr().err) == (2, True)
