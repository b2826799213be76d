"""The job file: what it means, and one clear line for everything that is wrong with one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client import job_file
from atoll.client.job_file import (
    AdaptSection,
    CheckpointSection,
    JobFile,
    load,
    name_from,
    parse_workers,
    with_flags,
)
from atoll.errors import BadInput, NotFound
from atoll.jobs.job_spec import MAX_WORKERS
from atoll.strategies.stale_sparse.settings import StaleSparse


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_a_whole_job_file_becomes_a_spec(tmp_path: Path) -> None:
    job = load(
        written(
            tmp_path,
            """
            name = "vit"
            script = "train.py"
            args = ["--lr", "0.1"]
            workers = "2:8"
            max_restarts = 1
            split = "even"
            seed = 7
            stall_timeout_s = 30
            strategy = "stale-sparse"

            [stale_sparse]
            sparsity = 0.995
            staleness = 0

            [env]
            EPOCHS = "3"

            [checkpoint]
            directory = "/mnt/vit"
            every_steps = 50
            keep = 4
            memory_replicas = 3
            site_safe = true
            """,
        )
    )
    spec = job.to_spec("src/train.py")
    assert (spec.name, spec.script, list(spec.args)) == ("vit", "src/train.py", ["--lr", "0.1"])
    assert (spec.min_workers, spec.max_workers, spec.max_restarts) == (2, 8, 1)
    assert (spec.split, spec.seed, spec.stall_timeout_s, dict(spec.env)) == ("even", 7, 30.0, {"EPOCHS": "3"})
    assert (spec.checkpoint.directory, spec.checkpoint.every_steps, spec.checkpoint.keep) == ("/mnt/vit", 50, 4)
    assert (spec.checkpoint.memory_replicas, spec.checkpoint.site_safe) == (3, True)
    assert spec.strategy == "stale-sparse"
    assert json.loads(spec.strategy_settings) == {"sparsity": 0.995, "staleness": 0}


def test_a_submitted_job_says_what_its_job_file_said() -> None:
    """`atoll restore` takes the settings over from there: all of them, or it is another job."""
    said: dict[str, object] = {
        "name": "vit",
        "script": "train.py",
        "args": ("--lr", "0.1"),
        "workers": "2:8",
        "standby": 1,
        "env": {"A": "1"},
        "secrets": ("WANDB_API_KEY",),
        "checkpoint": CheckpointSection(
            directory="/mnt/vit", every_steps=7, keep=3, keep_every_steps=70, memory_replicas=0, site_safe=True
        ),
        "max_restarts": 5,
        "split": "even",
        "seed": 4,
        "stall_timeout_s": 90.0,
        "hang_s": 600.0,
        "stop_grace_s": 40.0,
        "module": "package.train",
        "requirements": ("einops>=0.8",),
        "setup": "make",
        "strategy": "stale-sparse",
        "stale_sparse": StaleSparse(sparsity=0.5, staleness=0),
        "adapt": AdaptSection.model_validate({"batch": (64, 256), "learning_rate": "none", "sparsity": True}),
    }
    left_out = {
        "workdir",
        "local_steps",
        "zen",
        "compressed",
        "groups",
        "volunteer",
    }  # what travelled is there already; another strategy's settings
    assert set(said) | left_out == set(JobFile.model_fields)
    job = JobFile.model_validate(said)
    assert job_file.from_spec(job.to_spec("train.py")) == job


def test_the_manual_has_every_field() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text()
    told = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(told) == sorted(JobFile.model_fields)
    for section in (CheckpointSection, AdaptSection):
        assert [field for field in section.model_fields if f"`{field}`" not in page] == []


def test_an_empty_job_file_means_the_defaults(tmp_path: Path) -> None:
    spec = load(written(tmp_path, "")).to_spec("My Script.py")
    assert (spec.name, spec.min_workers, spec.max_workers) == ("my-script", 1, 1)
    assert (spec.split, spec.max_restarts, spec.checkpoint.keep) == ("auto", 1, 2)
    assert (spec.strategy, spec.strategy_settings) == ("auto", "")


def test_a_restored_job_is_asked_for_as_the_first_was() -> None:
    """atoll restore JOB makes a job file of what was submitted: nothing of it may be left out on the way."""
    job = JobFile.model_validate(
        {
            "name": "vit",
            "script": "train.py",
            "args": ["--lr", "0.1"],
            "workers": "2:8",
            "standby": 1,
            "env": {"EPOCHS": "3"},
            "secrets": ["TOKEN"],
            "checkpoint": {"directory": "s3://b/vit", "every_steps": 50, "keep": 4, "keep_every_steps": 500}
            | {"memory_replicas": 0, "site_safe": True},
            "max_restarts": 1,
            "split": "even",
            "seed": 7,
            "stall_timeout_s": 30,
            "hang_s": 600,
            "stop_grace_s": 40,
            "module": "package.train",
            "requirements": ["einops>=0.8"],
            "setup": "make",
            "strategy": "stale-sparse",
            "stale_sparse": {"sparsity": 0.995, "staleness": 0, "error_feedback": False, "values": "float32"}
            | {"selection": "topk", "exchange": "gradients", "momentum": "as-is"}
            | {"digest_every": 10},
            "adapt": {"batch": [128, 1024], "learning_rate": "square-root", "sparsity": True},
        }
    )
    left_out = {"workdir", "local_steps", "zen", "compressed", "groups", "volunteer"}
    assert job.model_fields_set | left_out == set(JobFile.model_fields)  # a new field belongs here
    assert job_file.from_spec(job.to_spec("train.py")).to_spec("train.py") == job.to_spec("train.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"\nworkerz = 3', "line 2: unknown field 'workerz'. Did you mean 'workers'?"),
        ("[checkpoint]\nkeep = 2\nevery = 3", "line 3: unknown field 'checkpoint.every'. Did you mean 'every_steps'?"),
        ("checkpoint = { every = 3 }", "line 1: unknown field 'checkpoint.every'. Did you mean 'every_steps'?"),
        ("checkpoint.every = 3", "line 1: unknown field 'checkpoint.every'. Did you mean 'every_steps'?"),
        (
            "xyzzy = 1",
            "line 1: unknown field 'xyzzy'. Known: module, args, standby, env, setup, checkpoint, max_restarts",
        ),
        ("[resources]\ngpus = 1", "line 1: unknown field 'resources'."),
        ("\nworkers = true", "line 2: workers = True is wrong: it should be a valid integer"),
        ("workers = '8:2'", "line 1: workers = '8:2' has a minimum of 8 above its maximum of 2. Write it as 2:8"),
        ("workers = 0", "line 1: workers = 0 needs at least 1 worker"),
        ("workers = 'many'", "line 1: workers = 'many' must be N or 'MIN:MAX', e.g. 4 or '2:8'"),
        ("workers = '1:5000'", "workers = '1:5000' may ask for at most 4096 workers"),
        ("seed = 1.5", "line 1: seed = 1.5 is wrong: it should be a valid integer"),
        ("seed = -1", "line 1: seed = -1 is wrong: it should be greater than or equal to 0"),
        ("name = 'Vit'", "line 1: name = 'Vit' must be 1 to 40 of a-z, 0-9 and '-'"),
        ("split = 'fair'", "line 1: split = 'fair' is wrong: it should be 'auto', 'inverse-time' or 'even'"),
        ("args = [1]", "line 1: args[0] = 1 is wrong: it should be a valid string"),
        ("[env]\nA = 1", "line 2: env.A = 1 is wrong: it should be a valid string"),
        ("[env]\n'A=B' = 'x'", "env.A=B = 'A=B' is not a name of a variable"),
        ("[checkpoint]\ndirectory = 'x'", "line 2: checkpoint.directory = 'x' must be an absolute path"),
        ("[checkpoint]\nkeep = 0", "line 2: checkpoint.keep = 0 is wrong: it should be greater than or equal to 1"),
        ("strategy = 'ring'", "line 1: strategy = 'ring' is not known. Use one of auto, dense"),
        (
            "strategy = 'stale-sparse'\n[stale_sparse]\nsparsty = 0.9",
            "unknown field 'stale_sparse.sparsty'. Did you mean 'sparsity'?",
        ),
        (
            "[stale_sparse]\nsparsity = 1",
            "line 2: stale_sparse.sparsity = 1 is wrong: it should be less than or equal to 0.9999",
        ),
        ("[stale_sparse]\nsparsity = nan", "line 2: stale_sparse.sparsity = nan is wrong"),
        ("[stale_sparse]\nstaleness = 2", "line 2: stale_sparse.staleness = 2 is wrong"),
        ("[stale_sparse]\nvalues = 'int3'", "line 2: stale_sparse.values = 'int3' is wrong: it should be 'float16'"),
        ("[stale_sparse]\nsparsity = 0.9", "strategy = 'auto' takes no stale_sparse settings. Leave them out, or say"),
        ("stall_timeout_s = nan", "line 1: stall_timeout_s = nan is wrong"),
        ("a = \nb = 1", "is not valid TOML: Invalid value (at line 1, column 5)"),
        ("name = 'a'\nname = 'b'\n", "is not valid TOML: Cannot overwrite a value (at line 2"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_job_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not there"):
        load(tmp_path / "nope.toml")
    with pytest.raises(BadInput, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="not UTF-8 at byte 0"):
        load(tmp_path / "binary.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(BadInput, match=r"larger than 1\.0 MiB"):
        load(tmp_path / "huge.toml")
    with pytest.raises(BadInput, match="job file"):
        load(written(tmp_path, "a = " + "[" * 50_000))


def test_flags_win_over_the_job_file(tmp_path: Path) -> None:
    job = load(written(tmp_path, "name = 'a'\nseed = 1\n[checkpoint]\nkeep = 5\nevery_steps = 10"))
    flagged = with_flags(job, {"name": "b", "seed": None, "checkpoint.every_steps": 20, "workers": "2:3"})
    assert (flagged.name, flagged.seed, flagged.workers) == ("b", 1, "2:3")
    assert (flagged.checkpoint.keep, flagged.checkpoint.every_steps) == (5, 20)


def test_a_wrong_flag_is_named_without_a_line() -> None:
    with pytest.raises(BadInput, match=r"^workers = '4:2' has a minimum of 4 above its maximum of 2"):
        with_flags(JobFile(), {"workers": "4:2"})
    with pytest.raises(BadInput, match=r"^checkpoint\.keep = 0 is wrong"):
        with_flags(JobFile(), {"checkpoint.keep": 0})


def test_a_flag_for_dense_leaves_the_files_other_strategy_out(tmp_path: Path) -> None:
    job = load(written(tmp_path, "strategy = 'stale-sparse'\n[stale_sparse]\nvalues = 'float32'"))
    sparse = with_flags(job, {"settings.sparsity": 0.9}).to_spec("a.py")
    assert json.loads(sparse.strategy_settings) == {"sparsity": 0.9, "values": "float32"}
    assert with_flags(job, {"strategy": "dense"}).to_spec("a.py").strategy_settings == ""
    with pytest.raises(BadInput, match="strategy = 'auto' takes no stale_sparse settings"):
        with_flags(JobFile(), {"stale_sparse.sparsity": 0.9})
    with pytest.raises(BadInput, match="`--sparsity` belongs to strategy stale-sparse; you chose none"):
        with_flags(JobFile(), {"settings.sparsity": 0.9})


def test_a_sparsity_to_adapt_needs_a_strategy_that_has_one_in_the_file_or_by_a_flag(tmp_path: Path) -> None:
    job = load(written(tmp_path, "[adapt]\nsparsity = true"))
    sparse = with_flags(job, {"strategy": "stale-sparse"})
    assert list(sparse.to_spec("a.py").adapt.strategy_params) == ["sparsity"]
    assert not with_flags(sparse, {"strategy": "dense"}).to_spec("a.py").adapt.strategy_params
    with pytest.raises(BadInput, match=r"adapt\.sparsity = true: strategy = 'auto' has no sparsity to adapt"):
        job.to_spec("a.py")


@pytest.mark.parametrize(
    ("text", "followed"),
    [
        ("", ["density", "every", "staleness", "gradients"]),
        ("[local_steps]\nevery = 2", ["density", "staleness", "gradients"]),
        ("[local_steps]\ndensity = 0.1\nstaleness = 2", ["every", "gradients"]),
        ("[local_steps]\ndensity = 0.1\n[adapt]\ndensity = true", ["density", "every", "staleness", "gradients"]),
        ("[adapt]\ndensity = false\nevery = false", ["staleness", "gradients"]),
    ],
)
def test_the_pace_of_local_steps_follows_links_and_devices_unless_the_job_says_otherwise(
    tmp_path: Path, text: str, followed: list[str]
) -> None:
    job = load(written(tmp_path, f"strategy = 'local-steps'\n{text}"))
    spec = job.to_spec("a.py")
    assert list(spec.adapt.strategy_params) == followed
    assert (
        list(job_file.from_spec(spec).to_spec("a.py").adapt.strategy_params) == followed
    )  # as a job that is submitted again
    set_by_hand = with_flags(job, {"settings.density": 0.3, "adapt.density": None}).to_spec("a.py")
    assert list(set_by_hand.adapt.strategy_params) == [name for name in followed if name != "density" or "true" in text]


FIELDS = st.sampled_from(
    sorted(JobFile.model_fields.keys() - {"checkpoint", "stale_sparse"})
    + [f"checkpoint.{name}" for name in CheckpointSection.model_fields]
    + [f"stale_sparse.{name}" for name in StaleSparse.model_fields]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(FIELDS, VALUES, max_size=3))
def test_any_values_are_a_job_that_fits_the_wire_or_an_error(values: dict[str, object]) -> None:
    try:
        said = with_flags(JobFile(), values).to_spec("train.py").SerializeToString()
    except BadInput as error:
        said = str(error).encode()
    assert said


@given(st.text(max_size=60))
def test_any_script_gives_a_name_that_is_allowed(script: str) -> None:
    assert JobFile(name=name_from(script)).name == name_from(script)


def test_worker_bounds() -> None:
    assert parse_workers("4") == (4, 4)
    assert parse_workers(" 2 : 8 ") == (2, 8)
    for text in ("", ":", "1:", ":2", "1:2:3", "-1", "1e3", "\u0662", "9" * 400):
        with pytest.raises(ValueError, match="MIN:MAX"):
            parse_workers(text)


def test_the_limits_are_those_of_the_wire() -> None:
    """Every value that passes here must fit its protobuf field."""
    spec = JobFile(seed=2**64 - 1, max_restarts=2**32 - 1, workers=MAX_WORKERS).to_spec("a.py")
    assert (spec.seed, spec.max_restarts, spec.max_workers) == (2**64 - 1, 2**32 - 1, 4096)
