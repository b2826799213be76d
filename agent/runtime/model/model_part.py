"""The part of a model that a stage holds, as checkpoints see it: one shard of the whole model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint
from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput


@dataclass(frozen=True, slots=True)
class ModelPart:
    """whole: fingerprint of all stages' tensors together. trained: names of all their parameters that train."""

    place: StagePlace
    cuts: tuple[int, ...]  # the first layer of each stage
    whole: Fingerprint
    trained: tuple[str, ...]
    group_sizes: tuple[tuple[int, ...], ...]
    """Number of parameters in each parameter group of the optimizer, by stage."""

    @property
    def writes(self) -> bool:
        """Return True if this rank writes ordinary checkpoints of its stage."""
        return self.place.pipeline == 0

    def in_view(self, rank: int, world_size: int) -> ModelPart:
        """Return this worker's part after a change of members. Raises BadInput if they form no whole pipelines."""
        return replace(self, place=StagePlace.of(rank, world_size, self.place.stages))

    def numbered(self, optimizer: OptimizerState) -> WholeNumbers:
        return WholeNumbers(optimizer, self.place.stage, self.group_sizes)


def gathered_sizes(group: Group, place: StagePlace, optimizer: OptimizerState) -> tuple[tuple[int, ...], ...]:
    """Gather the group sizes of each stage's optimizer. Collective. Raises BadInput if stages have other groups;
    PeerLost."""
    own = [len(each["params"]) for each in optimizer.param_groups]
    rows = [json.loads(one) for one in group.gather_bytes(json.dumps(own).encode())]
    sizes = tuple(tuple(row) for row in rows[: place.stages])
    if len({len(each) for each in sizes}) > 1:
        counts = [len(each) for each in sizes]
        raise BadInput(
            f"optimizer_factory gave the stages {counts} parameter groups. A checkpoint holds one model: give each "
            "stage as many, if need be with no parameter"
        )
    return sizes


class WholeNumbers:
    """An OptimizerState that numbers a stage's parameters as the optimizer of the whole model would: group by group,
    in each stage after stage. Its state dict has all groups, and the state of its own parameters."""

    def __init__(self, optimizer: OptimizerState, stage: int, sizes: Sequence[Sequence[int]]) -> None:
        """sizes: of each stage's groups."""
        self._optimizer = optimizer
        self._whole = [sum(each) for each in zip(*sizes, strict=True)]
        own_first = whole_first = 0
        self._groups: list[range] = []  # of each group, its numbers in the whole
        self._to_whole: dict[int, int] = {}
        for group, size in enumerate(sizes[stage]):
            here = whole_first + sum(each[group] for each in sizes[:stage])
            self._groups.append(range(whole_first, whole_first + self._whole[group]))
            self._to_whole |= {own_first + place: here + place for place in range(size)}
            own_first, whole_first = own_first + size, whole_first + self._whole[group]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:
        return self._optimizer.state

    def state_dict(self) -> dict[str, Any]:
        own = self._optimizer.state_dict()
        groups = zip(own["param_groups"], self._groups, strict=True)
        return {
            "state": {self._to_whole[number]: kept for number, kept in own["state"].items()},
            "param_groups": [{**group, "params": list(numbers)} for group, numbers in groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load this stage's part of the whole model's state. Raises ValueError for the state of another model."""
        groups = state_dict["param_groups"]
        found = [len(group["params"]) for group in groups]
        if found != self._whole:
            raise ValueError(f"it has groups of {found} parameters, the model's optimizer groups of {self._whole}")
        in_order = [number for group in groups for number in group["params"]]  # by our number, the checkpoint's
        saved = {ours: in_order[whole] for ours, whole in self._to_whole.items()}
        own = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict(
            {
                "state": {
                    ours: state_dict["state"][whole] for ours, whole in saved.items() if whole in state_dict["state"]
                },
                "param_groups": [{**group, "params": mine["params"]} for group, mine in zip(groups, own, strict=True)],
            }
        )
