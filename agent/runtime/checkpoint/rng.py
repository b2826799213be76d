"""The random generators of a process: torch (CPU and every GPU), python, numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from atoll.errors import CheckpointError


def capture() -> dict[str, Any]:
    """Their states, in a form that `pack_state` takes. Draws nothing."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
    }


def restore(state: dict[str, Any]) -> None:
    """Go on from there. States of GPUs that this process does not have are left out; further GPUs keep theirs.

    Raises CheckpointError where it is not what `capture` returned."""
    try:
        python, numpy = state["python"], state["numpy"]
        torch.set_rng_state(state["torch"])
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        keys = (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
        np.random.set_state(keys)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the random state in the checkpoint is malformed: {error}") from error
