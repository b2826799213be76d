from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from atoll.agent.runtime.checkpoint import rng
from atoll.agent.runtime.checkpoint.state import pack_state, unpack_state
from atoll.errors import CheckpointError


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(), np.random.rand(3).tolist(), np.random.randn()]


def test_every_generator_draws_on_as_if_nothing_had_happened() -> None:
    draw()  # leaves half of a gaussian pair behind in python and numpy
    tensors, scalars = pack_state({"rng": rng.capture()}, copy=True)
    expected = draw()
    draw()
    rng.restore(unpack_state(tensors, json.loads(json.dumps(scalars)))["rng"])
    assert draw() == expected


def test_a_malformed_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match="random state"):
        rng.restore({**rng.capture(), "torch": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="random state"):
        rng.restore({})
