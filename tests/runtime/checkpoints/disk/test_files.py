from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.agent.runtime.checkpoints.disk import files, listing, transfer
from atoll.agent.runtime.checkpoints.disk import header as headers
from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, check_fits, fingerprint
from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of, deserialized
from atoll.errors import CheckpointError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(("step-", ".writing", ".removing")))


def test_what_was_written_is_read(tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]) -> None:
    path = files.write(tmp_path / "new" / "deep", header(), tensors, {"lr": 0.1, "betas": [0.9, 0.99]})
    read = files.read(path)
    assert path.name == "step-000000100-run-000003"
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "state.safetensors"]
    assert (read.header, read.scalars, read.path) == (header(), {"lr": 0.1, "betas": [0.9, 0.99]}, path)
    assert read.header.created_by.startswith("atoll ")
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())


def test_other_tools_can_open_the_files(tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]) -> None:
    mixed = {**tensors, "half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor(True), "none": torch.empty(0)}
    path = files.write(tmp_path, header(), mixed, None)
    theirs = load_file(path / "state.safetensors")
    assert theirs.keys() == mixed.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mixed.items())
    assert json.loads((path / "manifest.json").read_text())["header"]["step"] == 100


def test_a_file_by_the_safetensors_library_is_understood(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "theirs.safetensors"
    save_file(tensors, file, metadata={"by": "them"})
    with file.open("rb", buffering=0) as source:
        ours, content = deserialized(source, file.stat().st_size)
    assert content.bytes == file.stat().st_size
    assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())


def test_writing_the_same_step_again_changes_nothing(
    tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]
) -> None:
    path = files.write(tmp_path, header(), tensors, 1)
    before = (path / "state.safetensors").stat().st_ino
    assert files.write(tmp_path, header(), {}, 2) == path
    assert ((path / "state.safetensors").stat().st_ino, files.read(path).scalars) == (before, 1)
    assert names(tmp_path) == [path.name]


def test_a_torn_one_of_the_same_step_is_replaced(tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]) -> None:
    path = files.write(tmp_path, header(), tensors, 1)
    os.truncate(path / "state.safetensors", 100)
    assert files.write(tmp_path, header(), tensors, 2) == path
    assert files.read(path).scalars == 2
    assert names(tmp_path) == [path.name]


def test_the_newest_is_of_the_newest_run_then_of_the_highest_step(tmp_path: Path, header: Any) -> None:
    for step, run in ((300, 3), (200, 4), (250, 4), (1_000_000_000, 3)):
        files.write(tmp_path, header(step, run), {}, None, as_run=4)
    found = listing.newest(tmp_path)
    assert [(one.run, one.step) for one in found] == [(4, 250), (4, 200), (3, 1_000_000_000), (3, 300)]
    newest = files.newest_valid(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.header.step == 250


def test_a_directory_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert listing.newest(tmp_path / "absent") == []
    assert files.newest_valid(tmp_path, pytest.fail) is None


def test_an_older_good_one_is_used_and_the_reader_is_told(
    tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]
) -> None:
    """1. The newest lost its manifest, the next has a flipped bit, the next is torn, the next was renamed."""
    for step in (100, 200, 300, 400, 500):
        files.write(tmp_path, header(step), tensors, None)
    at = {step: tmp_path / f"step-{step:09d}-run-000003" for step in (200, 300, 400, 500)}
    (at[500] / "manifest.json").unlink()
    state = bytearray((at[400] / "state.safetensors").read_bytes())
    state[-5] ^= 1
    (at[400] / "state.safetensors").write_bytes(state)
    os.truncate(at[300] / "state.safetensors", 1000)
    at[200].rename(tmp_path / "step-000000201-run-000003")
    told: list[str] = []
    found = files.newest_valid(tmp_path, told.append)
    assert found is not None
    assert found.header.step == 100
    assert len(told) == 4
    text = "\n".join(told)
    for words in (
        f"{at[500]}/manifest.json: No such file",
        f"{at[400]}/state.safetensors is damaged: bytes 0 to {len(state)} are not those",
        "step-000000300-run-000003 is tried in its place",
        f"{at[300]}/state.safetensors is torn: it has 1000 bytes; {len(state)} were written",
        "step-000000100-run-000003 is tried in its place",
        "somebody renamed it",
    ):
        assert words in text


def test_old_ones_are_removed_but_never_the_newest_sound_one(
    tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]
) -> None:
    for step in (1, 2, 3, 4, 5):
        files.write(tmp_path, header(step), tensors, None)
    assert [path.name for path in listing.keep_newest(tmp_path, 4)] == ["step-000000001-run-000003"]
    for step in (3, 4, 5):
        os.truncate(tmp_path / f"step-{step:09d}-run-000003" / "state.safetensors", 64)
    assert listing.keep_newest(tmp_path, 3) == []
    assert names(tmp_path) == [f"step-{step:09d}-run-000003" for step in (2, 3, 4, 5)]
    files.write(tmp_path, header(6), tensors, None)
    listing.keep_newest(tmp_path, 1)
    assert names(tmp_path) == ["step-000000006-run-000003"]
    with pytest.raises(CheckpointError, match="keep = 0"):
        listing.keep_newest(tmp_path, 0)


def test_what_dead_writers_left_is_swept_and_live_ones_are_not(tmp_path: Path, header: Any) -> None:
    dead, live, half = (tmp_path / name for name in (".writing-dead", ".writing-live", ".removing-half"))
    for folder in (dead, live, half):
        folder.mkdir()
        (folder / "state.safetensors").write_bytes(b"...")
    with (live / "state.safetensors").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files.write(tmp_path, header(), {}, None)
        assert names(tmp_path) == [".writing-live", "step-000000100-run-000003"]
    files.write(tmp_path, header(101), {}, None)
    assert not live.exists()


def test_a_peer_gets_the_same_checkpoint(tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]) -> None:
    path = files.write(tmp_path, header(), tensors, {"a": [1]})
    mine = files.read(path)
    listing = transfer.from_bytes(transfer.to_bytes(transfer.listed(mine)))
    wanted = listing.lacking({})
    assert all(wanted)
    got = listing.read(wanted, transfer.gathered(listing, wanted, mine.tensors), {})
    assert (got.header, got.scalars, got.path) == (header(), {"a": [1]}, None)
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in tensors.items())
    stored = files.write(tmp_path / "theirs", got.header, got.tensors, got.scalars, as_run=9)
    assert (stored / "state.safetensors").read_bytes() == (path / "state.safetensors").read_bytes()


def test_a_peer_gets_nothing_that_it_has(tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor]) -> None:
    """It has the bits of all but one tensor, and one of another shape."""
    mine = files.read(files.write(tmp_path, header(), tensors, None))
    listing = transfer.listed(mine)
    other, another = sorted(name for name in tensors if tensors[name].numel())[:2]
    known = {**tensors, other: tensors[other].clone(), another: tensors[another].reshape(-1)[:0]}
    bytes_of(known[other])[0] ^= 1
    wanted = listing.lacking(known)
    assert [one.name for one, is_wanted in zip(listing.tensors, wanted, strict=True) if is_wanted] == [
        one.name for one in listing.tensors if one.name in {other, another}
    ]
    sent = transfer.gathered(listing, wanted, mine.tensors)
    assert sent.nbytes == sum(tensors[name].nbytes for name in (other, another))
    got = listing.read(wanted, sent, known)
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in tensors.items())


def test_what_is_too_large_to_send_is_refused_at_both_ends(
    tmp_path: Path, header: Any, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = files.read(files.write(tmp_path, header(), tensors, None))
    sent = transfer.to_bytes(transfer.listed(found))
    monkeypatch.setattr(headers, "MAX_STATE_BYTES", 1000)
    with pytest.raises(CheckpointError, match="at most 1000 are written and sent"):
        transfer.listed(found)
    with pytest.raises(CheckpointError, match="at most 1000 are written and sent"):
        transfer.from_bytes(sent)


def test_scalars_that_are_not_json_are_refused_before_anything_is_published(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError, match="Use pack_state"):
        files.write(tmp_path, header(), {}, {"a": object()})
    with pytest.raises(CheckpointError, match="Use pack_state"):
        files.write(tmp_path, header(), {}, float("nan"))
    with pytest.raises(CheckpointError, match="complex128"):
        files.write(tmp_path, header(), {"z": torch.zeros(1, dtype=torch.complex128)}, None)
    assert names(tmp_path) == []


def test_another_models_checkpoint_is_refused_with_the_tensor(header: Any) -> None:
    model = torch.nn.Linear(2, 3)
    own = fingerprint(model.state_dict())
    check_fits(header(), header().model)
    assert own.tensors == {"weight": ("float32", (3, 2)), "bias": ("float32", (3,))}
    wider = Fingerprint({**header().model.tensors, "layer.bias": ("float32", (5,))})
    with pytest.raises(
        CheckpointError, match=r"layer.bias is float32 \[3\] in the checkpoint and float32 \[5\] in this"
    ):
        check_fits(header(), wider)
    with pytest.raises(CheckpointError, match="tensor bias is absent in the checkpoint"):
        check_fits(header(), own)


def test_a_checkpoint_of_a_later_format_says_so(tmp_path: Path, header: Any) -> None:
    path = files.write(tmp_path, replace(header(), format=2, created_by="atoll 9.0"), {}, None)
    with pytest.raises(CheckpointError, match=r"format 2 \(by 'atoll 9.0'\); this version reads 1"):
        files.read(path)


def test_damage_in_a_large_file_is_located(
    tmp_path: Path, header: Any, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setattr("atoll.agent.runtime.checkpoints.disk.manifest.CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr("atoll.agent.runtime.checkpoints.disk.manifest.CHUNK_BYTES", 1 << 16)
    path = files.write(tmp_path, header(), tensors, None)
    with (path / "state.safetensors").open("rb+") as file:
        file.seek(200_000)
        byte = file.read(1)[0]
        file.seek(200_000)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(CheckpointError, match="bytes 196608 to 262144 are not those that were written"):
        files.read(path)
