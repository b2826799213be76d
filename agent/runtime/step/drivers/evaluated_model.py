"""The model as all ranks share it, shown in place of this rank's own while the script evaluates it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.tensorfile import digest_of
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput


class SharedValues(Protocol):
    """The part of a step driver that shows the shared parameters."""

    def show_shared(self) -> None: ...

    def show_own(self) -> None: ...


class EvaluatedModel:
    """`shown` shows the model that a checkpoint of this moment holds. Parameters that train come from the strategy;
    buffers and frozen parameters, where ranks differ in them, from rank 0, which writes them into checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.is_shown = False

    def refuse_training(self, what: str) -> None:
        """Raises BadInput while the model is shown."""
        if self.is_shown:
            raise BadInput(
                f"{what} during an evaluation. Leave the block `with run.evaluation():` first; iterate "
                "run.evaluation_loader to its end, or drop its iterator"
            )

    @contextmanager
    def shown(self, driver: SharedValues, group: Group | None) -> Iterator[None]:
        """Collective. Afterwards every value is as it was before. Raises PeerLost."""
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with _outside_inference():
            driver.show_shared()
        self.is_shown = True
        try:
            with _outside_inference():
                own = self.level(group)
            yield
        finally:
            with _outside_inference():
                for tensor, kept in own:
                    tensor.copy_(kept)
                driver.show_own()
            self.is_shown = False

    def level(self, group: Group | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Collective: overwrite what does not train with rank 0's values, where ranks differ. Returns what was
        overwritten, each with a copy of its own values. Raises PeerLost."""
        if group is None:
            return []
        frozen = {name: one.detach() for name, one in self._model.named_parameters() if not one.requires_grad}
        untrained = {**frozen, **dict(self._model.named_buffers())}
        own = {name: [str(one.dtype), list(one.shape), digest_of(one)] for name, one in untrained.items()}
        ranks = [json.loads(said) for said in group.gather_bytes(json.dumps(own).encode())]
        differing = [
            untrained[name]
            for name, (*kind, digest) in ranks[0].items()
            if all(name in said and said[name][:2] == kind for said in ranks)
            if any(said[name][2] != digest for said in ranks)
        ]
        kept = [one.clone() for one in differing]
        group.broadcast_tensors(differing)
        return list(zip(differing, kept, strict=True))


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Change tensors in such a way that they can be trained with after the script's torch.inference_mode(), and that
    autocast sees it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
    torch.clear_autocast_cache()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Apply model.eval() and torch.no_grad(); afterwards restore each module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
