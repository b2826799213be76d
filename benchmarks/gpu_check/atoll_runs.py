"""Atoll runs inside a stage: what they import, and a process group of one rank."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Final

import torch.distributed as dist

import atoll
from atoll.agent.runtime.transport import meeting
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.registry import FOLDERS

MEETS_WITHIN_S: Final = 60.0


def import_everything() -> None:
    """Import what a run would import later, before processes are forked that each would."""
    for name in ("torch._dynamo", *(f"atoll.strategies.{folder}.worker" for folder in FOLDERS)):
        import_module(name)


def join_one_rank(run: atoll.Run) -> Group:
    """Give a run of one worker the group that a run of several has: NCCL on a GPU, gloo on the CPU. Before prepare."""
    session = run._session
    store = dist.PrefixStore(f"{id(run)}", dist.HashStore())  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=MEETS_WITHIN_S))
    session.group = meeting._made(session.place, run.device, store, MEETS_WITHIN_S, abortable=False, links=None)
    return session.group
