"""The run of a process that another framework shall take for one alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from itertools import islice
from typing import Any, Final

from atoll.agent.runtime.api.run import Run, init
from atoll.telemetry.telemetry_limits import MAX_METRICS

_SAID_BY_TORCHRUN: Final = ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def joined_alone(**options: Any) -> Run:
    """Call atoll.init(**options), and hide the other workers and their GPUs from the environment."""
    show_own_gpu_alone(os.environ)
    run = init(**options)
    for name in _SAID_BY_TORCHRUN:  # or the framework would wrap the model, split the data and meet the others itself
        os.environ.pop(name, None)
    return run


def show_own_gpu_alone(environ: MutableMapping[str, str]) -> None:
    """Hide the GPUs of the node's other workers: these frameworks take cuda:0, where torchrun's scripts take
    cuda:LOCAL_RANK. It has no effect where CUDA was used before; `attach` then refuses."""
    visible, local_rank = environ.get("CUDA_VISIBLE_DEVICES", "").split(","), int(environ.get("LOCAL_RANK", "0"))
    if "ATOLL_AGENT_SOCKET" in environ and local_rank < len(visible):
        environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank]


def report(run: Run, logged: Mapping[str, float]) -> None:
    """Report the framework's logged numbers, at most MAX_METRICS of them."""
    run.report(**dict(islice(logged.items(), MAX_METRICS)))
