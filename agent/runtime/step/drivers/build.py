"""Builds the driver that fits the capability of the session's strategy."""

from __future__ import annotations

from atoll.agent.runtime.agent_link.strategy_channel import StrategyChannel
from atoll.agent.runtime.channel.agreement import Agreed, ProposalExchange
from atoll.agent.runtime.channel.channel import Channel
from atoll.agent.runtime.channel.proposals import ReducedProposals
from atoll.agent.runtime.model.prepared_parameters import PreparedParameters
from atoll.agent.runtime.step.drivers.coordination import Coordination
from atoll.agent.runtime.step.drivers.engine_step import EngineStep
from atoll.agent.runtime.step.drivers.local_update_step import LocalUpdateStep
from atoll.agent.runtime.step.drivers.reduced_step import ReducedStep
from atoll.agent.runtime.step.drivers.single_step import SingleStep
from atoll.agent.runtime.step.drivers.step_driver import StepDriver, StepParts
from atoll.agent.runtime.strategy_interface.capabilities import (
    Engine,
    EngineParts,
    LocalUpdate,
    WorkerContext,
    WorkerHalf,
)
from atoll.agent.runtime.strategy_interface.script_checks import Script, check_script
from atoll.strategies import registry
from atoll.strategies.declaration import load


def build_driver(
    parts: StepParts, agreed: Agreed, engine_parts: EngineParts | None, learned: object = None
) -> StepDriver:
    """Build the strategy's worker half and its driver, for the members that the session names.

    agreed: what holds before the first pass. engine_parts: if the script leaves the step to an engine. learned: by the
    half of the view before. Raises BadInput for what the strategy cannot train."""
    session, model = parts.session, parts.model
    group, strategy = session.group, registry.of(session.strategy)
    script = Script(model=model, optimizers=parts.optimizers, engine_parts=engine_parts, device=session.device)
    check_script(session.strategy, script)
    channel = Channel(session, parts.links_busy)
    context = WorkerContext(
        session=session,
        settings=session.strategy,
        model=model,
        optimizers=parts.optimizers,
        events=parts.events,
        channel=channel,
        scheduler=StrategyChannel(session.link, strategy),
        engine_parts=engine_parts.in_view(session.place) if engine_parts is not None else None,
        learned=learned,
    )
    half: WorkerHalf = load(strategy.worker)(context)
    capability = half.capability
    local = isinstance(capability, LocalUpdate)
    proposals: ProposalExchange | None = None
    if group is not None:
        proposals = channel.proposals if local else ReducedProposals(group)
    coordination = Coordination(
        session,
        channel,
        proposals,
        agreed,
        lag=capability.lag if isinstance(capability, LocalUpdate) else 0,
        prepared=PreparedParameters(model, parts.optimizers) if group is not None else None,
        measures=half.measures,
        links=half.links,
    )
    if isinstance(capability, LocalUpdate):
        return LocalUpdateStep(parts, half, coordination, capability)
    if isinstance(capability, Engine):
        return EngineStep(parts, half, coordination, capability)
    if group is None:
        return SingleStep(parts, half, coordination)
    return ReducedStep(parts, half, coordination, capability, group)
