"""The header of a checkpoint, and the check that it fits a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from atoll.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FORMAT: Final = 1
MAX_TENSORS: Final = 1_000_000
MAX_STATE_BYTES: Final = 1 << 42
"""Of a checkpoint's tensors, or of one rank's shard in memory. More is neither written nor taken from a peer."""
COMPILED: Final = "_orig_mod."
"""torch.compile puts this before the names of a module that it wraps."""


def plain_name(name: str) -> str:
    """The name of a parameter or buffer as it is without torch.compile."""
    return name.replace(COMPILED, "")


def check_size(size: int, what: str) -> None:
    """Raises CheckpointError, before it is written, for what no rank would take at a recovery."""
    if size > MAX_STATE_BYTES:
        raise CheckpointError(
            f"{what} takes {size} bytes; at most {MAX_STATE_BYTES} are written and sent. Train in stages, or on more "
            "machines"
        )


@dataclass(frozen=True)
class Fingerprint:
    """A model's tensors by name: (dtype, shape). Equal digests mean that a state dict of one loads into the other."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @cached_property
    def digest(self) -> str:
        """BLAKE2b (128 bit, hex) over the sorted names, dtypes and shapes."""
        listed = json.dumps([[name, *self.tensors[name]] for name in sorted(self.tensors)])
        return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        tensors = {name: [dtype, list(shape)] for name, (dtype, shape) in self.tensors.items()}
        return {"digest": self.digest, "tensors": tensors}


def fingerprint(model_state: Mapping[str, Any]) -> Fingerprint:
    """Describe a model's state_dict(), by plain names. Entries that are not tensors are left out."""
    import torch  # the agent's daemon reads headers without it

    tensors = {name: value for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    return Fingerprint({plain_name(name): (_dtype(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()})


@cache
def _created_by() -> str:
    """Return the name and version of this program. To read the version parses a whole file, in 4 ms."""
    return f"atoll {version('atoll')}"


@dataclass(frozen=True, kw_only=True)
class Header:
    """Identity of a checkpoint. `run` and `step` order checkpoints: higher is newer, the run first."""

    job: str
    run: int
    step: int  # optimizer updates completed
    epoch: int
    consumed: int  # samples of the epoch
    loader_step: int  # global batches completed since the job began
    world_size: int  # of the run that wrote it; any other may go on from it
    seed: int
    model: Fingerprint
    view: int = 1  # of that run
    samples: int = 0  # of the epoch, all of it; 0: not known
    strategy: str = ""  # by which it was trained; empty: not known
    format: int = FORMAT
    created_by: str = field(default_factory=_created_by)

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return f"step-{self.step:09d}-run-{self.run:06d}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_json()}

    @staticmethod
    def from_json(data: Any) -> Header:
        """Raises CheckpointError naming the field that is missing or wrong."""
        if not isinstance(data, dict):
            raise CheckpointError("the header is not an object")
        if data.get("format") != FORMAT:
            raise CheckpointError(
                f"it has format {data.get('format')!r} (by {data.get('created_by')!r}); this version reads {FORMAT}"
            )
        numbers = whole_numbers(data, _LIMITS, "its header")
        if not isinstance(data.get("job"), str) or not isinstance(data.get("created_by"), str):
            raise CheckpointError("job or created_by is missing in its header")
        model = _fingerprint_from_json(data.get("model"))
        strategy = str(data.get("strategy", ""))  # headers of older versions have none
        return Header(job=data["job"], created_by=data["created_by"], model=model, strategy=strategy, **numbers)


def check_fits(header: Header, model: Fingerprint) -> None:
    """Raises CheckpointError, naming the first tensor that differs, where the checkpoint is of another model."""
    if header.model.digest == model.digest:
        return
    theirs, ours = header.model.tensors, model.tensors
    name = min(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    what = f"{_described(theirs.get(name))} in the checkpoint and {_described(ours.get(name))} in this model"
    raise CheckpointError(
        f"checkpoint {header.name} of job {header.job!r} is of another model: tensor {name} is {what}. Train the "
        "model that wrote it, or use another checkpoint directory"
    )


def whole_numbers(body: Mapping[str, Any], limits: Mapping[str, int], where: str) -> dict[str, Any]:
    """Return the numbers of these names, each below its limit. Raises CheckpointError for what is none."""
    for name, limit in limits.items():
        value = body.get(name)
        if type(value) is not int or not 0 <= value < limit:
            raise CheckpointError(f"{name} = {value!r} in {where} is not a whole number of 0 or more")
    return {name: body[name] for name in limits}


_LIMITS: Final = {
    **dict.fromkeys(("run", "step", "epoch", "consumed", "loader_step", "world_size", "view", "samples"), 2**63),
    "seed": 2**64,
}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {list(entry[1])}"


def _fingerprint_from_json(data: Any) -> Fingerprint:
    tensors = data.get("tensors") if isinstance(data, dict) else None
    if not isinstance(tensors, dict) or len(tensors) > MAX_TENSORS:
        raise CheckpointError("the list of the model's tensors is missing in its header, or too long")
    try:
        found = Fingerprint({name: (str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in tensors.items()})
    except (TypeError, ValueError, OverflowError) as error:  # the last for infinities
        raise CheckpointError(f"the list of the model's tensors in its header is malformed: {error}") from error
    if found.digest != data.get("digest"):
        raise CheckpointError("the fingerprint of the model in its header does not match its list of tensors")
    return found
