"""Files that users write: each way not to be readable has its own words; the limit holds before anything is parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.errors import AtollError, BadInput, NotFound
from atoll.host.documents import did_you_mean, line_of, read_document, read_toml


def test_a_document_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"a" * 2048)
    assert read_document("job file", path, 2048, large="Cut it") == b"a" * 2048
    with pytest.raises(BadInput, match=r"job file .*job\.toml is larger than 1.0 KiB\. Cut it"):
        read_document("job file", path, 1024, large="Cut it")


def test_toml_comes_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("name = 'ü'\n")
    assert read_toml("job file", path, 2**20, large="Cut it") == ({"name": "ü"}, "name = 'ü'\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"name = '\xff'", "is not UTF-8 at byte 8"),
        (b"name = ", "is not valid TOML: "),
        (b"a = " + b"[" * 100_000, "is nested too deeply. A scenario is a few lines of TOML"),
        (b"#" * (2**20 + 1), "is larger than 1.0 MiB. Cut it"),
    ],
)
def test_what_is_no_toml_is_refused_by_file_and_cause(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_toml("scenario", path, 2**20, large="Cut it")
    assert f"scenario {path} {told}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("gone", NotFound, "profile {path} is not there. Make one"),
        ("", BadInput, "profile {path} cannot be read: Is a directory. Check the path"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path: Path, name: str, kind: type[AtollError], told: str) -> None:
    path = tmp_path / name
    with pytest.raises(kind) as refused:
        read_document("profile", path, 1024, absent="Make one", large="Cut it")
    assert str(refused.value) == told.format(path=path)


def test_a_field_is_found_by_its_section_or_by_the_inline_table_it_is_in() -> None:
    text = "# keep = 1\nseed = 3\n[checkpoint]\nkeep = 2\n[[devices]]\n'sample_s' = 1\n"
    assert line_of(text, ["seed"]) == 2
    assert line_of(text, ["checkpoint", "keep"]) == 4
    assert line_of(text, ["devices", "sample_s"]) == 6
    assert line_of(text, ["checkpoint", "every"]) == 3  # not there: its section's
    assert line_of("adapt = {\n rate = 1 }", ["adapt", "rate"]) == 1
    assert line_of(text, ["nowhere"]) is None


def test_a_name_that_is_none_brings_the_nearest_or_all_of_them() -> None:
    assert did_you_mean("optprf", ["even", "optperf"]) == "Did you mean 'optperf'?"
    assert did_you_mean("xyzzy", ["even", "optperf"]) == "Known: even, optperf"
