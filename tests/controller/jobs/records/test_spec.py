from __future__ import annotations

import json
import math
from typing import Any

import pytest
from made import job

from atoll.client.job_file import JobFile, with_flags
from atoll.controller.jobs.model.offline_profile import spec_from_wire
from atoll.controller.state.codec import decode, encode
from atoll.controller.state.records import JobRecord
from atoll.errors import BadInput
from atoll.jobs.job_spec import to_wire
from atoll.strategies import registry
from atoll.strategies.declaration import as_json
from atoll.strategies.dense.settings import Dense
from atoll.strategies.stale_sparse.settings import MAX_SPARSITY, StaleSparse
from atoll.v1 import common_pb2 as pb

SHA = "ab" * 32
SPARSE: dict[str, Any] = {"strategy": "stale-sparse"}
SURROGATE = json.dumps(
    {
        "sparsities": [0.9, 0.99],
        "batches": [64, 256],
        "extra": [[0.0, 0.1], [0.2, 0.3]],
        "model": {"fingerprint": SHA, "words": "an MLP"},
    }
)


def wire(**fields: Any) -> pb.JobSpec:
    given: dict[str, Any] = {
        "name": "vit",
        "script": "train.py",
        "min_workers": 1,
        "max_workers": 4,
        "code_sha256": SHA,
        **fields,
    }
    return pb.JobSpec(**given)


def sparse(**fields: Any) -> dict[str, Any]:
    return {"strategy": "stale-sparse", "strategy_settings": json.dumps(fields)}


def test_a_good_spec_survives_both_ways() -> None:
    full = wire(
        args=["--lr", "0.1"],
        env={"B": "2", "A": "1"},
        checkpoint=pb.CheckpointPolicy(
            directory="s3://bucket/vit",
            every_steps=50,
            keep=3,
            memory_replicas=0,
            keep_every_steps=1000,
            start_from=pb.StartFrom(job="vit-3f9a", directory="/data/vit", step=0),
        ),
        max_restarts=2,
        split="even",
        seed=2**63,
        stall_timeout_s=30,
        strategy="stale-sparse",
        strategy_settings=as_json(
            {
                "sparsity": 0.0,
                "staleness": 0,
                "selection": "topk",
                "values": "bfloat16",
                "error_feedback": False,
                "momentum": "as-is",
                "digest_every": 7,
                "exchange": "gradients",
            }
        ),
        adapt=pb.Adaptation(learning_rate="none", strategy_params=["sparsity"], profile=SURROGATE),
    )
    full.secrets["TOKEN"] = "hunter2"
    back = to_wire(spec_from_wire(full))
    assert back.adapt.profile == ""  # only planning reads it
    assert back.secrets == {"TOKEN": ""}
    back.adapt.profile = SURROGATE
    back.secrets["TOKEN"] = "hunter2"
    assert back == full


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"secrets": {"A=B": "hunter2"}}, "is not a name of a variable"),
        ({"secrets": {"KEY": "hunter2\0"}}, r"spec.secrets\[KEY\] = '\*\*\*' has a zero byte"),
        ({"secrets": {"KEY": "hunter2" * 1000}}, r"spec.secrets\[KEY\] = '\*\*\*' is longer than 4096 bytes"),
        ({"secrets": {"KEY": ""}}, "spec.secrets.KEY = '' is empty.*Set it where you submit"),
        ({"secrets": {"KEY": "hunter2"}, "env": {"KEY": "x"}}, r"spec.secrets.KEY = '\*\*\*' is in env too"),
    ],
)
def test_a_secret_that_cannot_be_is_refused_without_being_shown(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        spec_from_wire(wire(**fields))
    assert "hunter2" not in str(refused.value)


def test_a_secret_is_in_etcd_and_in_nothing_that_is_written_or_shown() -> None:
    spec = spec_from_wire(wire(secrets={"TOKEN": "hunter2"}))
    assert "hunter2" not in f"{spec} {spec!r} {to_wire(spec)}"
    record = job(spec=spec)
    kept = encode(record)
    assert b'"TOKEN":"hunter2"' in kept
    assert decode(JobRecord, "/atoll/jobs/a", kept) == record
    assert to_wire(spec, reveal=True).secrets == {"TOKEN": "hunter2"}


def test_what_was_left_out_gets_its_meaning() -> None:
    spec = spec_from_wire(wire(script="./examples/train.py"))
    assert spec.checkpoint.memory_replicas == 2
    assert (spec.split, spec.checkpoint.keep, spec.script) == ("auto", 2, "examples/train.py")
    assert to_wire(spec).strategy == "auto"
    sparse = json.loads(to_wire(spec_from_wire(wire(strategy="stale-sparse"))).strategy_settings)
    assert (sparse["sparsity"], sparse["staleness"], sparse["values"]) == (0.8, 1, "int2")


def test_worker_and_controller_mean_the_same_by_what_was_left_out() -> None:
    for spec in (to_wire(spec_from_wire(wire(strategy="stale-sparse"))), wire(strategy="stale-sparse")):
        assert registry.find(spec.strategy).read_settings(spec.strategy_settings) == StaleSparse()
    dense = to_wire(spec_from_wire(wire()))
    assert registry.find(dense.strategy).read_settings(dense.strategy_settings) == Dense()
    flags = {"strategy": "stale-sparse", "settings.sparsity": MAX_SPARSITY}
    assert json.loads(with_flags(JobFile(), flags).to_spec("a.py").strategy_settings) == {"sparsity": MAX_SPARSITY}
    with pytest.raises(BadInput, match=r"stale_sparse\.sparsity"):
        with_flags(JobFile(), {**flags, "settings.sparsity": math.nextafter(MAX_SPARSITY, 1)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "spec.name = ''"),
        ({"name": "Big"}, "spec.name = 'Big' must be 1 to 40"),
        ({"name": "-x"}, "spec.name"),
        ({"name": "a" * 41}, "spec.name"),
        ({"name": "a/../b"}, "spec.name"),
        ({"script": ""}, "spec.script = '' must be a path inside the code bundle"),
        ({"script": "/etc/passwd"}, "spec.script"),
        ({"script": "../x.py"}, "spec.script"),
        ({"script": "."}, "spec.script"),
        ({"script": "-c"}, "spec.script"),
        ({"script": "a\0b.py"}, "zero byte"),
        ({"script": "x" * 5000}, "longer than 4096 bytes"),
        ({"args": ["x"] * 257}, "spec.args = '257 entries'"),
        ({"args": ["x" * 5000]}, r"spec.args\[0\]"),
        ({"env": {"A B": "1"}}, "spec.env = 'A B' is not a name"),
        ({"env": {"A": "\0"}}, r"spec.env\[A\]"),
        ({"min_workers": 0}, "spec.min_workers = 0 should be greater than or equal to 1"),
        ({"min_workers": 5}, "spec.max_workers = 4 must be at least min_workers = 5"),
        (
            {"strategy": "groups", "strategy_settings": '{"stages": 3}'},
            "spec.min_workers = 1 makes up no whole pipelines of 3 stages",
        ),
        ({"max_workers": 5000}, "spec.max_workers = 5000"),
        ({"code_sha256": "AB" * 32}, "spec.code_sha256"),
        ({"split": "fair"}, "spec.split = 'fair' should be 'auto', 'inverse-time' or 'even'"),
        ({"adapt": pb.Adaptation(min_batch=64)}, "spec.adapt.min_batch = 64 to 0 is no range of the total batch"),
        ({"adapt": pb.Adaptation(min_batch=64, max_batch=32)}, "spec.adapt.min_batch = 64 to 32 is no range"),
        ({"adapt": pb.Adaptation(max_batch=32)}, "spec.adapt.min_batch = 0 to 32 is no range"),
        (
            {"adapt": pb.Adaptation(min_batch=8, max_batch=32), "split": "even"},
            'spec.adapt.max_batch = 32 has no meaning with split "even"',
        ),
        ({"adapt": pb.Adaptation(strategy_params=["sparsity"])}, "spec.adapt.sparsity = True is nothing that.*auto"),
        (
            {"adapt": pb.Adaptation(learning_rate="double")},
            "spec.adapt.learning_rate = 'double' should be 'auto', 'adascale', 'square-root' or 'none'",
        ),
        ({"adapt": pb.Adaptation(profile="{}")}, "spec.adapt.profile = '…' is of compression"),
        ({"adapt": pb.Adaptation(profile="{"), **SPARSE}, "spec.adapt.profile: the offline profile is not JSON"),
        ({"adapt": pb.Adaptation(profile="{}"), **SPARSE}, "spec.adapt.profile: field .sparsities. is missing"),
        (
            {"adapt": pb.Adaptation(profile=" " * 300_000), **SPARSE},
            "spec.adapt.profile = '300000 char.* at most 262144",
        ),
        ({"strategy": "ring"}, "spec.strategy = 'ring' is not known. Use one of auto, dense, stale-sparse"),
        ({"strategy_settings": '{"sparsity":0.9}'}, "spec.dense.sparsity = 0.9 is not known. Known: none"),
        (sparse(sparsity=1.0), "spec.stale_sparse.sparsity = 1.0 should be less than or equal to 0.9999"),
        (sparse(sparsity=-0.1), "spec.stale_sparse.sparsity = -0.1"),
        (sparse(sparsity=math.nan), "spec.stale_sparse.sparsity = nan"),
        (sparse(staleness=2), "spec.stale_sparse.staleness = 2 should be less than or equal to 1"),
        (sparse(selection="some"), "spec.stale_sparse.selection = 'some' should be 'threshold', 'topk' or 'random'"),
        (sparse(values="int3"), "spec.stale_sparse.values = 'int3'"),
        (sparse(momentum="none"), "spec.stale_sparse.momentum = 'none'"),
        (
            sparse(error_feedback=False),
            'spec.stale_sparse.error_feedback = False has no meaning with exchange = "updates"',
        ),
        (sparse(colour="blue"), "spec.stale_sparse.colour = 'blue' is not known. Known: sparsity, staleness"),
        ({**SPARSE, "strategy_settings": "[]"}, "spec.stale_sparse"),
        ({**SPARSE, "strategy_settings": " " * 20_000}, "spec.stale_sparse has 20000 characters, at most 16384"),
        ({"stall_timeout_s": -1}, "spec.stall_timeout_s = -1"),
        ({"stall_timeout_s": math.nan}, "spec.stall_timeout_s = nan"),
        (
            {"checkpoint": pb.CheckpointPolicy(directory="here")},
            "spec.checkpoint.directory = 'here' must be",
        ),
        ({"checkpoint": pb.CheckpointPolicy(directory="/a/../b")}, "spec.checkpoint.directory"),
        (
            {"checkpoint": pb.CheckpointPolicy(directory="s3://me:secret@bucket")},
            "spec.checkpoint.directory = 's3://...@bucket' is no URL that can be kept",
        ),
        ({"checkpoint": pb.CheckpointPolicy(directory="S3 ://x")}, "is no URL that can be kept"),
        (
            {"checkpoint": pb.CheckpointPolicy(start_from=pb.StartFrom())},
            "spec.checkpoint.start_from.directory = '' is missing",
        ),
        (
            {"checkpoint": pb.CheckpointPolicy(start_from=pb.StartFrom(job="../x"))},
            "spec.checkpoint.start_from.job = '../x' is no id",
        ),
        (
            {"checkpoint": pb.CheckpointPolicy(memory_replicas=9)},
            "spec.checkpoint.memory_replicas = 9 should be less than or equal to 8",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        spec_from_wire(wire(**fields))
