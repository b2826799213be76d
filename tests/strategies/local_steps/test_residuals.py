"""Residuals on disk between two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.model.durable import Origin, OwnState
from atoll.agent.runtime.transport.frames import Kind
from atoll.kernels.exchange_engine import RecentPart
from atoll.strategies.shared_params import residuals

NO_SUMS: dict[str, Any] = {"aggregator_sums": {}, "versions": {}, "following": {}}


@pytest.fixture
def told() -> list[str]:
    return []


def write(
    directory: Path,
    step: int,
    value: float,
    rank: int = 0,
    *,
    parts: Sequence[Mapping[str, Any]] = (),
    sums: Mapping[str, Any] = NO_SUMS,
    view: int = 1,
) -> None:
    at: dict[str, Any] = {"run": 1, "view": view, "step": step, "epoch": 0, "consumed": 0, "loader_step": step}
    header = Header(job="tiny", **at, world_size=2, seed=7, model=Fingerprint({}))
    own = {"residuals": {"layer": torch.full((3,), value)}, "parts": list(parts), "optimizer": None}
    state = {**own, **sums, "flushes": {"layer": 0}, "given": {}}
    residuals.write(directory, header, rank, pack_state(state, copy=True))


def own(directory: Path, step: int, told: list[str], shared: Mapping[str, torch.Tensor]) -> dict[int, OwnState]:
    """What one rank alone takes over of two, by rank, as the next run goes on from `step`."""
    session: Any = SimpleNamespace(
        place=SimpleNamespace(rank=0, is_main=True),
        group=None,
        checkpoint=SimpleNamespace(directory=directory),
        notice=lambda level, text: told.append(text),
    )
    origin = Origin(run=1, view=1, step=step, world_size=2, shared=shared)
    found = residuals.take_over(session, origin, {"layer": 3})
    return {one.rank: one for one in found}


def taken_over(directory: Path, step: int, told: list[str]) -> dict[int, float]:
    """The first value of each residual."""
    return {rank: float(one.residual["layer"][0]) for rank, one in own(directory, step, told, of_round(7)).items()}


def part(sync_round: int, value: float, *, total: bool = False) -> dict[str, Any]:
    kind = Kind.FROM_AGGREGATOR if total else Kind.PART
    index, values = np.zeros(1, np.uint32), np.full((1, 16), value, np.float32)
    layer: Any = SimpleNamespace(name="layer", at=0, blocks=1)
    tensor: Any = SimpleNamespace(number=0, layers=[layer])
    return residuals.as_rows([tensor], [RecentPart(kind, sync_round, 0, index, values)])[0]


def test_what_another_view_wrote_is_with_others_by_now(tmp_path: Path, told: list[str]) -> None:
    write(tmp_path, 8, 1.0)
    write(tmp_path, 9, 2.0, view=2)
    write(tmp_path, 8, 3.0, rank=1, view=2)
    assert taken_over(tmp_path, 9, told) == {0: 1.0}
    assert any("rank 1" in text for text in told)


def test_one_that_is_not_there_is_told_of(tmp_path: Path, told: list[str]) -> None:
    write(tmp_path, 10, 1.0, rank=1)
    assert taken_over(tmp_path, 10, told) == {1: 1.0}
    assert ["rank 0" in text for text in told] == [True]


def of_round(number: int) -> dict[str, torch.Tensor]:
    return {"versions": torch.tensor([number]), "flushes": torch.tensor([0]), "staleness": torch.tensor(1)}


def summed(version: int, *, following: int) -> dict[str, Any]:
    sums = {"layer": torch.full((3,), 5.0)}
    return {"aggregator_sums": sums, "versions": {"layer": version}, "following": {"layer": following}}


def test_a_part_that_its_aggregator_has_is_no_residual_again(tmp_path: Path, told: list[str]) -> None:
    """1. The checkpoint has round 7 of a layer. Rank 1, its aggregator, is at round 8 already. 2. Rank 0's part of
    round 8 is in the aggregator's sum and stays there; that of round 9 is rank 0's again. 3. The shared parameters lack
    the total of round 8: it is in the sum again."""
    write(tmp_path, 10, 1.0, rank=0, parts=[part(7, 10.0), part(8, 20.0), part(9, 40.0)])
    sums = summed(8, following=9)
    write(tmp_path, 10, 2.0, rank=1, parts=[part(7, 0.25, total=True), part(8, 0.5, total=True)], sums=sums)
    found = own(tmp_path, 10, told, of_round(7))
    assert found[0].residual["layer"].tolist() == [41.0] * 3
    assert found[1].residual["layer"].tolist() == [2.0] * 3
    assert found[1].aggregator_sums["layer"].tolist() == [5.5] * 3
    assert found[0].aggregator_sums == {}
    assert told == []


def test_a_sum_that_is_older_than_the_checkpoint_is_lost_aloud(tmp_path: Path, told: list[str]) -> None:
    """The aggregator was killed and left what it wrote a step before: the shared parameters took some of it since, and
    nobody knows which."""
    write(tmp_path, 9, 1.0, rank=0, sums=summed(6, following=7))
    write(tmp_path, 9, 2.0, rank=1)
    found = own(tmp_path, 9, told, of_round(7))
    assert not found[0].aggregator_sums["layer"].any()
    assert ["rank 0 had summed of layer" in text for text in told] == [True]


def test_a_sum_is_whole_while_its_layer_had_no_turn_since(tmp_path: Path, told: list[str]) -> None:
    """The aggregator stopped a step before the checkpoint, in whose sync round this layer was not exchanged."""
    write(tmp_path, 9, 1.0, rank=0, sums=summed(6, following=8))
    write(tmp_path, 9, 2.0, rank=1)
    assert own(tmp_path, 9, told, of_round(7))[0].aggregator_sums["layer"].tolist() == [5.0] * 3
    assert told == []
    assert not own(tmp_path, 9, told, of_round(8))[0].aggregator_sums["layer"].any()
