"""The profile on disk: complete ones are loaded without torch or scikit-optimize, all else is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from profiles_made import empty, probe, with_trials

from atoll.controller.planners.registry import PLANNERS
from atoll.errors import BadInput, NotFound
from atoll.profiling.document import Document, load_profile, write
from atoll.profiling.profiler import finished


@pytest.fixture(scope="module")
def complete() -> Document:
    return finished(with_trials(empty(), probe(0.5, 8), probe(0.9, 16), probe(0.999, 32, 0.9)))


@pytest.fixture
def path(tmp_path: Path, complete: Document) -> Path:
    write(complete, tmp_path / "train.profile.json")
    return tmp_path / "train.profile.json"


def test_a_complete_profile_is_loaded_and_the_planner_takes_its_surrogate(path: Path) -> None:
    found = load_profile(path)
    given = {
        "devices": [{"alpha": 8, "beta": 100}, {"alpha": 8, "beta": 100, "island": 1}],
        "bandwidths": [1e6, 1e6],
        "entries": found["model"]["entries"],
        "samples": 10_000,
        "surrogate": found["surrogate"],
    }
    plan = json.loads(PLANNERS["tta"].run_json(json.dumps(given)))
    assert 8 <= plan["total_batch"] <= 32
    assert len(found["error"]) == len(found["surrogate"]["sparsities"])


def test_it_is_loaded_without_torch_and_without_scikit_optimize(path: Path) -> None:
    code = (
        "import sys; [sys.modules.__setitem__(name, None) for name in ('torch', 'skopt', 'sklearn', 'scipy')]\n"
        "from pathlib import Path; from atoll.profiling.document import load_profile\n"
        f"print(load_profile(Path({str(path)!r}))['kind'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("atoll-profile\n", "")


def test_one_that_is_not_complete_is_refused_with_how_to_complete_it(tmp_path: Path) -> None:
    write(with_trials(empty(wanted=30), probe(0.9, 8)), tmp_path / "p.json")
    with pytest.raises(BadInput, match=r"has 1 of 30 probes. Run the same `atoll profile` again"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "other"}, "kind: Input should be 'atoll-profile'"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"surrogate": {"sparsities": [0.9], "batches": [8], "extra": [[1e9]]}}, "surrogate.extra.0.0: "),
        (
            {"surrogate": {"sparsities": [0.9, 0.5], "batches": [8], "extra": [[0], [0]]}},
            "sparsities: Value error, must ascend",
        ),
        (
            {"surrogate": {"sparsities": [0.5, 0.9], "batches": [8], "extra": [[0]]}},
            "must have 2 rows of 1 in extra",
        ),
        ({"probes": [{"sparsity": 1.5}]}, "probes.0.sparsity: "),
    ],
)
def test_what_is_wrong_is_named(path: Path, change: dict[str, object], said: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput) as refused:
        load_profile(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b" " * 300_000])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"profile .*p\.json"):
        load_profile(tmp_path / "p.json")


def test_a_missing_file_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="`atoll profile train.py` makes one"):
        load_profile(tmp_path / "p.json")


def test_writing_leaves_the_old_file_or_the_new_one_and_nothing_else(path: Path) -> None:
    document = with_trials(empty())
    write(document, path)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text())["probes"] == []
