"""Several runs, one after the other, in the same processes: importing torch is most of what a short run costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import atoll
from atoll.strategies.declaration import StrategySettings

PORTS = iter(sys.argv[1].split(","))


@contextmanager
def opened(
    strategy: str | StrategySettings, *, seed: int = 7, checkpoints: Path | None = None, every: int = 0
) -> Iterator[atoll.Run]:
    """The next run of this process, on a rendezvous of its own."""
    os.environ["MASTER_PORT"] = next(PORTS)
    run = atoll.init(seed=seed, strategy=strategy, checkpoint_directory=checkpoints, checkpoint_every=every)
    try:
        yield run
    finally:
        run.close()


def bits(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(one.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors.values())


def check_all_ranks_have(run: atoll.Run, tensors: dict[str, torch.Tensor]) -> None:
    """Every rank's are bit-identical to this one's. Collective."""
    if run._session.group is not None:
        said = run._session.group.gather_bytes(bits(tensors))
        assert all(one == said[0] for one in said), [rank for rank, one in enumerate(said) if one != said[0]]


def shared_params(run: atoll.Run, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters' true values, copied; only at a boundary where everything settled."""
    assert run._training is not None
    by_id = run._training._current.driver.durable.shared_params()
    return {name: by_id[id(one)].clone() for name, one in model.named_parameters() if id(one) in by_id}
