"""A worker joins its run: what its agent says of it, the process group, and all that is known at its start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch

from atoll.agent.runtime.agent_link.link import AgentLink
from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.plans.planned_step import PlannedStep, planned_from_wire
from atoll.agent.runtime.session.probe import Probe
from atoll.agent.runtime.session.session import (
    CheckpointSettings,
    MemorySettings,
    Session,
    checkpoint_settings,
    memory_settings,
)
from atoll.agent.runtime.session.throttle import Throttle
from atoll.agent.runtime.step.state.randomness import seed_alike
from atoll.agent.runtime.transport import meeting
from atoll.agent.runtime.transport.process_groups import COLLECTIVE_TIMEOUT_S
from atoll.agent.runtime.transport.relayed_links import RelayedLinks
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings
from atoll.v1.agents_pb2 import Member

CONTEXT_BYTES: Final = 640 << 20
"""What a process takes of a GPU beside torch's allocator: its CUDA context and the kernels of libraries."""


def join(
    place: WorkerPlace,
    link: AgentLink | None,
    *,
    seed: int,
    strategy: StrategySettings,
    checkpoint: CheckpointSettings,
    probe: Probe | None,
) -> Session:
    """Join the run that the agent at the other end of `link` says, or one of its own under torchrun or by hand.

    seed, strategy, checkpoint: of the script; a submitted job's hold in their place. Raises BadInput for a launch that
    cannot be, PeerLost where others do not come."""
    timeout_s, speed = COLLECTIVE_TIMEOUT_S, 1.0
    first: PlannedStep | None = None
    memory: MemorySettings | None = None
    members: tuple[Member, ...] = ()
    joins = False
    if link is not None:
        welcome, spec = link.welcome, link.welcome.launch.spec
        seed = spec.seed or seed
        timeout_s, speed, joins = max(timeout_s, spec.stall_timeout_s), welcome.speed, link.joins
        chosen = registry.find(spec.strategy)
        strategy = chosen.read_settings(spec.strategy_settings)
        checkpoint = checkpoint_settings(welcome)
        if not joins:  # who does is told the members and the plan of the view that takes it in
            first = planned_from_wire(welcome.launch.plan, chosen) if welcome.launch.plan.shares else None
            members = _in_order(welcome.launch.members, place.world_size)
        memory = memory_settings(welcome, members)
    seed_alike(seed)
    device = _choose_device(place)
    sync = torch.cuda.synchronize if device.type == "cuda" else None
    abortable = link is not None and link.makes_views
    links = RelayedLinks(members, place.rank, link.passage) if link is not None and members else None
    group = None if joins else meeting.join(place, device, abortable=abortable, links=links)
    launch = link.welcome.launch if link is not None else None
    return Session(
        place=place,
        device=device,
        job=place.agent.job if place.agent is not None else "",
        run=place.agent.run if place.agent is not None else 0,
        seed=seed,
        strategy=strategy,
        checkpoint=checkpoint,
        first=first,
        group=group,
        collective_timeout_s=timeout_s,
        link=link,
        throttle=Throttle(speed, sync),
        memory=memory,
        probe=probe,
        members=members,
        links=links,
        view=0 if joins else 1,
        helping=launch.helping if launch is not None and launch.HasField("helping") else None,
        strategy_is_automatic=launch is not None and launch.strategy_is_automatic,
        keys=launch.keys if launch is not None and launch.HasField("keys") else None,
    )


def _in_order(members: Sequence[Member], world_size: int) -> tuple[Member, ...]:
    """Return the values by rank. Raises BadInput if some ranks are missing; an empty list is valid."""
    found = sorted(members, key=lambda member: member.rank)
    if found and [member.rank for member in found] != list(range(world_size)):
        ranks = [member.rank for member in found][:8]
        raise BadInput(f"the launch names ranks {ranks} of a run of {world_size}; each once")
    return tuple(found)


def limit_memory(device: torch.device, sharers: int) -> None:
    """Have torch's allocator refuse more than this worker's part of a GPU that agents share."""
    if sharers > 1:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        own_bytes = total_bytes / sharers
        torch.cuda.set_per_process_memory_fraction(max(own_bytes - CONTEXT_BYTES, own_bytes / 2) / total_bytes, device)


def _choose_device(place: WorkerPlace) -> torch.device:
    """Return this worker's GPU where one is visible. An agent makes only the worker's own visible, or none.

    Raises BadInput where the agent announced a GPU that torch cannot use: the plan counts on its speed and memory."""
    announced = place.agent is not None and place.agent.has_gpu
    if not announced and not torch.cuda.is_available():
        return torch.device("cpu")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if announced and place.agent is not None:
            limit_memory(device, place.agent.gpu_sharers)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        why = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"this worker was placed on a GPU ({os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}), which torch "
            f"{torch.__version__} cannot use: {why}. Install a build of torch for the CUDA of this machine's driver "
            '(nvidia-smi shows it), or start the agent with CUDA_VISIBLE_DEVICES="" to train on the CPU'
        ) from error
    return device
