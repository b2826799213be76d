"""Writes a checkpoint's model as a plain file that needs nothing of Atoll. Imports torch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from atoll.agent.runtime.checkpoints.disk import listing
from atoll.agent.runtime.checkpoints.disk.state import unpack_state
from atoll.agent.runtime.checkpoints.disk.tensorfile import serialized
from atoll.agent.runtime.checkpoints.disk.transfer import LoadedCheckpoint
from atoll.agent.runtime.checkpoints.remote_checkpoints import load
from atoll.agent.runtime.model.model_state import plain_state
from atoll.errors import BadInput, CheckpointError

__all__ = ["is_of", "load", "write"]


def is_of(path: Path, job: str) -> bool:
    """Return True if the job wrote the checkpoint in this folder: another machine's path may exist here too."""
    try:
        return listing.read_manifest(path).header.job == job
    except CheckpointError:
        return False


def write(checkpoint: LoadedCheckpoint, output: Path, *, safetensors: bool) -> list[str]:
    """Write the model's state dict to `output`, whole or not at all. Returns the names of entries that the format
    cannot hold, being no tensors. Raises CheckpointError where there is no model in it, BadInput from the disk."""
    model = unpack_state(checkpoint.tensors, checkpoint.scalars).get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"checkpoint {checkpoint.header.name} of job {checkpoint.header.job!r} holds no model")
    model = plain_state(model)
    tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    temporary = output.with_name(f".{output.name}.{os.getpid()}.new")
    try:
        with temporary.open("xb") as file:
            if safetensors:
                for part in serialized(tensors):
                    file.write(part)
            else:
                torch.save(model, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
    except OSError as error:
        raise BadInput(f"{output} cannot be written: {error.strerror or error}. Free space, or name another") from error
    finally:
        temporary.unlink(missing_ok=True)
    return sorted(model.keys() - tensors.keys()) if safetensors else []
