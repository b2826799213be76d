from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, Header

MODEL = Fingerprint({"layer.weight": ("float32", (3, 4)), "layer.bias": ("float32", (3,))})

MakeHeader = Callable[..., Header]


@pytest.fixture
def header() -> MakeHeader:
    def make(step: int = 100, run: int = 3) -> Header:
        return Header(
            job="tiny-1a2b",
            run=run,
            step=step,
            epoch=2,
            consumed=640,
            loader_step=step,
            world_size=2,
            seed=7,
            model=MODEL,
        )

    return make


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/layer.weight": torch.randn(3, 4, generator=generator),
        "model/layer.bias": torch.randn(3, generator=generator),
        "optimizer/step": torch.tensor(100.0),
        "optimizer/moment": torch.randn(300, 500, generator=generator),
    }
