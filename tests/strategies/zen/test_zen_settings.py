"""What a user says to strategy zen, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.client.job_file import JobFile, load, with_flags
from atoll.errors import BadInput, SettingError
from atoll.strategies import registry
from atoll.strategies.declaration import Shown
from atoll.strategies.zen.settings import Zen
from atoll.strategies.zen.view import status


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_job_file_and_a_flag_choose_it(tmp_path: Path) -> None:
    job = load(written(tmp_path, "strategy = 'zen'\n[zen]\nscheme = 'sparcml'"))
    spec = job.to_spec("train.py")
    assert (spec.strategy, json.loads(spec.strategy_settings)) == ("zen", {"scheme": "sparcml"})
    assert with_flags(JobFile(), {"strategy": "zen"}).to_spec("train.py").strategy == "zen"
    assert with_flags(job, {"strategy": "dense"}).to_spec("train.py").strategy_settings == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strategy = 'zen'\n[zen]\nscheme = 'best'", "zen.scheme = 'best' is wrong: it should be 'auto', 'allreduce'"),
        ("strategy = 'zen'\n[zen]\nsparsity = 0.9", "sparsity"),
        ("[zen]\nscheme = 'zen'", "strategy = 'auto' takes no zen settings"),
    ],
)
def test_a_job_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        load(written(tmp_path, text))


def test_settings_made_by_hand_are_checked_alike() -> None:
    assert Zen().scheme == "auto"
    with pytest.raises(SettingError, match="scheme = 'best' should be 'auto', 'allreduce'"):
        Zen(scheme="best")  # type: ignore[arg-type]


def test_status_tells_the_scheme_the_densities_and_the_bytes() -> None:
    strategy = registry.find("zen")
    assert {metric.name for metric in strategy.metrics} == {"density", "density_of_all", "sent_bytes"}
    metrics = {"density": 0.0217, "density_of_all": 0.0834, "sent_bytes": 236_000.0}
    shown = Shown(settings=Zen(), planned=None, metrics=metrics)
    assert status(shown) == ["scheme auto", "density 2.17 % of a worker, 8.34 % of all", "236.0 kB sent in a step"]
    assert status(Shown(settings=Zen(scheme="zen"), planned=None, metrics={})) == ["scheme zen"]
