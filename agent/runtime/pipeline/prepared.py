"""Prepares a worker for its place in a pipeline: cuts the model, makes its stage, and says what it is a part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.model.model_part import ModelPart, gathered_sizes
from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.cutting import cut
from atoll.agent.runtime.pipeline.layers import Layers, MakesLayer
from atoll.agent.runtime.session.session import Session
from atoll.errors import BadInput
from atoll.v1.common_pb2 import LEVEL_WARNING

MakesOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def prepared_stage(
    session: Session,
    place: StagePlace,
    model: nn.Module | Sequence[nn.Module | MakesLayer],
    optimizer_factory: MakesOptimizer,
    *,
    split_at: Sequence[str] | None,
    example: Callable[[], Any],
) -> tuple[nn.Module, torch.optim.Optimizer, ModelPart | None]:
    """(the stage's module, its optimizer, what part of the model it is; None: all of it). Collective where there are
    several stages. Raises BadInput, PeerLost."""
    whole = isinstance(model, nn.Module) and not any(one.is_meta for one in model.parameters())
    if isinstance(model, nn.Module) and place.stages == 1 and whole:
        model.to(session.device)
        return model, _made(optimizer_factory, model.parameters()), None
    layers = Layers.of(model)
    cuts = cut(session, place, layers, split_at, example)
    layers.refuse_tied(cuts)
    ends = (*cuts[1:], len(layers))
    stage = layers.stage(cuts[place.stage], ends[place.stage], session.seed).to(session.device)
    if not any(one.requires_grad for one in stage.parameters()):
        names = ", ".join(layers.names[cuts[place.stage] : ends[place.stage]])
        raise BadInput(f"stage {place.stage} has no parameter that trains (layers {names}). Use fewer stages")
    optimizer = _made(optimizer_factory, stage.parameters())
    if place.stages == 1:
        return stage, optimizer, None
    assert session.group is not None
    if session.memory is not None:
        session.memory = None  # of checkpoints in memory each shard is of a whole model
        if session.place.is_main:
            session.notice(LEVEL_WARNING, "checkpoints of a model in stages are kept on disk only, not in memory")
    sizes = gathered_sizes(session.group, place, optimizer)
    return stage, optimizer, ModelPart(place, cuts, layers.fingerprint, layers.trained, sizes)


def _made(optimizer_factory: MakesOptimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Raises BadInput for what is no optimizer."""
    made = optimizer_factory(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise BadInput(
            f"optimizer_factory of run.prepare_pipeline returned a {type(made).__name__}; it makes one "
            "torch.optim.Optimizer. What parameters need apart goes into its parameter groups"
        )
    return made
