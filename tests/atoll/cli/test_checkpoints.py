"""checkpoints, restore, export: what is asked, shown and refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripted_controller import ScriptedController
from typer.main import get_command
from typer.testing import CliRunner

from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.checkpoints import sources
from atoll.cli.main import app
from atoll.errors import BadInput
from atoll.v1 import common_pb2 as common
from atoll.v1 import jobs_pb2 as pb

JOB = "vit-3f9a"


def invoke(controller: ScriptedController | None, *arguments: str) -> Any:
    first = ("--controller", controller.address) if controller is not None else ()
    return CliRunner().invoke(app, [*first, *arguments])


def write(directory: Path, step: int, model: torch.nn.Module) -> Path:
    state = {"model": model.state_dict(), "optimizer": {"lr": 0.1}}
    numbers = {"run": 2, "epoch": 0, "consumed": 0, "loader_step": step, "world_size": 1, "seed": 0}
    header = Header(job=JOB, step=step, model=fingerprint(model.state_dict()), **numbers)  # type: ignore[arg-type]
    return files.write(directory, header, *pack_state(state))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.embedding = torch.nn.Embedding(3, 4)
        self.head = torch.nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight


def rows(*found: pb.StoredCheckpoint, notes: tuple[str, ...] = ()) -> pb.CheckpointsReply:
    return pb.CheckpointsReply(job=JOB, checkpoints=found, notes=notes)


def on_disk(step: int, path: str = "/mnt/vit", **fields: Any) -> pb.StoredCheckpoint:
    about: dict[str, Any] = {
        "shards": 1,
        "shards_there": 1,
        "bytes": 3 << 20,
        "age_s": 61.0,
        "health": "complete",
        "nodes": ["a"],
    }
    name = f"step-{step:09d}-run-000002"
    about |= {"tier": "disk", "run": 2, "step": step, "path": f"{path}/{name}"}
    return pb.StoredCheckpoint(**(about | fields))


def test_tiers_are_listed_with_what_is_wrong_beside_them(controller: ScriptedController) -> None:
    controller.script.add(JOB)
    memory = pb.StoredCheckpoint(
        tier="own memory", run=2, step=400, shards=4, shards_there=3, bytes=900, health="in progress", nodes=["a", "b"]
    )
    torn = on_disk(200, health="damaged", shards_there=0, trouble="state.safetensors is torn")
    controller.script.checkpoints[JOB] = rows(memory, on_disk(300), torn, notes=("node c is gone",))
    shown = invoke(controller, "checkpoints", JOB)
    assert shown.exit_code == 0
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["TIER", "STEP", "RUN", "SHARDS", "SIZE", "AGE", "HEALTH", "WHERE"],
        ["own", "memory", "400", "2", "3", "of", "4", "900", "Bytes", "0", "s", "in", "progress", "a,", "b"],
        ["disk", "300", "2", "1", "of", "1", "3.0", "MiB", "1", "min", "complete", "a"],
        ["disk", "200", "2", "0", "of", "1", "3.0", "MiB", "1", "min", "damaged", "a"],
    ]
    assert shown.stderr.splitlines() == ["state.safetensors is torn", "node c is gone"]
    document = json.loads(invoke(controller, "checkpoints", JOB, "--json").stdout)
    assert (document["job"], len(document["checkpoints"]), document["notes"]) == (JOB, 3, ["node c is gone"])
    assert document["checkpoints"][1]["path"] == "/mnt/vit/step-000000300-run-000002"


def test_sources_are_told_by_their_looks() -> None:
    one = "step-000000100-run-000003"
    assert sources.parse("vit", 5) == sources.CheckpointSource(job="vit", step=5)
    assert sources.parse("/mnt/vit/", None) == sources.CheckpointSource(directory=Path("/mnt/vit"))
    assert sources.parse(f"/mnt/vit/{one}", None) == sources.CheckpointSource(directory=Path("/mnt/vit"), step=100)
    assert sources.parse(f"s3://bucket/vit/{one}", 100) == sources.CheckpointSource(url="s3://bucket/vit", step=100)
    with pytest.raises(BadInput, match="--step 7 names another"):
        sources.parse(f"/mnt/vit/{one}", 7)


def test_a_restored_job_is_submitted_with_the_others_code_and_settings(controller: ScriptedController) -> None:
    spec = controller.script.add(JOB, pb.PHASE_DONE).spec
    spec.MergeFrom(
        common.JobSpec(
            args=["--lr", "1"], env={"A": "1"}, max_restarts=7, seed=3, standby=1, split="even", strategy="stale-sparse"
        )
    )
    spec.strategy_settings = '{"sparsity":0.9}'
    spec.checkpoint.CopyFrom(
        common.CheckpointPolicy(directory="/mnt", every_steps=9, keep=4, memory_replicas=1, site_safe=True)
    )
    controller.script.checkpoints[JOB] = rows(on_disk(300))
    done = invoke(controller, "restore", JOB, "--step", "300", "--env", "B=2", "--keep", "5", "--", "--lr", "2")
    assert done.exit_code == 0, done.stderr
    assert "from step 300 of vit-3f9a, on node a" in done.stderr
    (header,) = controller.script.headers
    assert (header.code_of, controller.script.code) == (JOB, b"")
    expected = common.JobSpec()
    expected.CopyFrom(spec)
    expected.args[:] = ["--lr", "2"]
    expected.env["B"] = "2"
    expected.checkpoint.keep = 5
    expected.checkpoint.start_from.CopyFrom(common.StartFrom(job=JOB, directory="/mnt", step=300))
    header.spec.ClearField("adapt")
    assert json.loads(header.spec.strategy_settings)["sparsity"] == 0.9
    header.spec.strategy_settings = spec.strategy_settings
    assert header.spec == expected


def test_what_submit_takes_of_a_job_restore_takes_as_well(controller: ScriptedController) -> None:
    """The same options, but for those that say which script."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    submit, restore = (
        {option for parameter in commands[name].params for option in parameter.opts} for name in ("submit", "restore")
    )
    assert submit - restore == {"script"}
    assert restore - submit == {"source", "--step", "--script"}
    spec = controller.script.add(JOB, pb.PHASE_DONE).spec
    spec.MergeFrom(common.JobSpec(standby=1, split="even", strategy="stale-sparse"))
    controller.script.checkpoints[JOB] = rows(on_disk(300))
    flags = ("--standby", "2", "--split", "auto", "--sparsity", "0.95", "--adapt-sparsity", "--adapt-batch", "8:64")
    done = invoke(controller, "restore", JOB, *flags)
    assert done.exit_code == 0, done.stderr
    got = controller.script.headers[0].spec
    assert (got.standby, got.split, json.loads(got.strategy_settings)["sparsity"]) == (2, "auto", 0.95)
    assert (list(got.adapt.strategy_params), got.adapt.min_batch, got.adapt.max_batch) == (["sparsity"], 8, 64)


def test_what_cannot_be_restored_is_refused_with_what_is_there(controller: ScriptedController, tmp_path: Path) -> None:
    controller.script.add(JOB)
    torn = on_disk(200, health="damaged", shards_there=0, trouble="state.safetensors is torn: it has 5 bytes")
    controller.script.checkpoints[JOB] = rows(on_disk(300), torn, notes=("node c is gone",))
    script = tmp_path / "train.py"
    script.write_text("print()")
    sound = write(tmp_path / "jobs", 10, Tied())
    broken = write(tmp_path / "jobs", 20, Tied())
    content = bytearray((broken / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (broken / "state.safetensors").write_bytes(content)
    with_script = ("--script", str(script))
    for arguments, message in (
        ((JOB, "--step", "7"), "no checkpoint of step 7 of vit-3f9a on disk or in a store: there is step 300; node c"),
        ((JOB, "--step", "200"), "state.safetensors is torn: it has 5 bytes"),
        (("nobody",), "no job 'nobody'"),
        ((str(tmp_path / "jobs"),), "says nothing of the code. Give it with --script"),
        ((str(tmp_path / "jobs"), *with_script, "--step", "7"), "there is step 10, 20"),
        ((str(broken), *with_script), "state.safetensors is damaged: bytes 0 to"),
        ((f"file://{tmp_path}/jobs", *with_script, "--step", "7"), "there is step 10, 20"),
        ((JOB, "--keep", "0"), "checkpoint.keep = 0 is wrong"),
    ):
        done = invoke(controller, "restore", *arguments)
        assert done.exit_code in (1, 2)
        assert message in done.stderr
    assert controller.script.headers == []
    done = invoke(controller, "restore", str(sound), *with_script)
    assert done.exit_code == 0, done.stderr
    assert controller.script.headers[0].spec.checkpoint.start_from == common.StartFrom(
        directory=str(tmp_path / "jobs"), step=10
    )


@pytest.mark.parametrize("where", ["job", "directory", "url", "store of a job"])
def test_an_exported_model_is_what_plain_torch_and_safetensors_read(
    controller: ScriptedController, tmp_path: Path, where: str
) -> None:
    model, jobs = Tied(), tmp_path / "jobs"
    write(jobs, 10, Tied())
    path = write(jobs, 20, model)
    controller.script.add(JOB)
    row = on_disk(20, str(jobs))
    if where == "store of a job":
        row = on_disk(20, f"file://{jobs}", tier="store")
    controller.script.checkpoints[JOB] = rows(row)
    source = {"directory": str(jobs), "url": f"file://{path}"}.get(where, JOB)
    done = invoke(controller, "export", source, "-o", str(tmp_path / "model.pt"))
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'model.pt'}: the model of vit-3f9a, step 20\n")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert isinstance(state, OrderedDict)
    fresh = Tied()
    fresh.load_state_dict(state)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
    done = invoke(controller, "export", source, "-o", str(tmp_path / "model.safetensors"), "--safetensors", "--json")
    assert json.loads(done.stdout)["step"] == 20
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["jobs", "model.pt", "model.safetensors"]


def test_an_export_that_cannot_be_says_where_the_files_are_and_leaves_nothing(
    controller: ScriptedController, tmp_path: Path
) -> None:
    controller.script.add(JOB)
    controller.script.checkpoints[JOB] = rows(on_disk(300))
    output = ("-o", str(tmp_path / "model.pt"))
    for arguments, message in (
        ((JOB, *output), "is not on this machine but on node a. Run there: atoll export /mnt/vit/step-000000300"),
        ((JOB, "-o", str(tmp_path)), "is no file in a folder that is there"),
        ((str(tmp_path / "none"), *output), "no checkpoint in"),
        (("no-such://x/y", *output), "Protocol not known"),
    ):
        done = invoke(controller, "export", *arguments)
        assert message in done.stderr + str(done.exception)
    assert list(tmp_path.iterdir()) == []
