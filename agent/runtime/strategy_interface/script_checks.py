"""Checks of a script against strategies. `run.prepare` refuses what the job's strategy cannot train, and reports which
other strategies the script allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import nn

from atoll.agent.runtime.agent_link.exits import say
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.optimizers.sparse_gradients import (
    refuse_dense_optimizers,
    refuse_sparse_modules,
)
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts
from atoll.errors import BadInput
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings, load
from atoll.telemetry.telemetry_limits import MAX_REASON
from atoll.v1.agents_pb2 import Prepared

WITHOUT_ENGINE: Final = "strategy {name} makes the updates itself: call run.prepare_pipeline in place of run.prepare"
WITHOUT_OWN_STEP: Final = (
    "run.prepare_pipeline needs a strategy with an engine of its own, and {name} has none. Use "
    'strategy "groups", or run.prepare'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Model, optimizers and engine parts that a script handed to `run.prepare` or `run.prepare_pipeline`."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    engine_parts: EngineParts | None  # None: the script makes passes and updates
    device: torch.device  # on which it trains


ScriptCheck: TypeAlias = Callable[[StrategySettings, Script], None]
"""Type of `Strategy.script_check`: raises BadInput for what the strategy with these settings cannot train."""


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for what the strategy of these settings cannot train."""
    strategy = registry.of(settings)
    if strategy.engine and script.engine_parts is None:
        raise BadInput(WITHOUT_ENGINE.format(name=strategy.name))
    if strategy.script_check:
        check: ScriptCheck = load(strategy.script_check)
        check(settings, script)
    if script.engine_parts is not None and not strategy.engine:
        raise BadInput(WITHOUT_OWN_STEP.format(name=strategy.name))
    if strategy.sparse_gradients:
        refuse_dense_optimizers(script.model, script.optimizers)
    else:
        refuse_sparse_modules(script.model)


def why_refused(settings: StrategySettings, script: Script) -> str | None:
    """Return in one line why the script does not allow the strategy of these settings; None if it does."""
    try:
        check_script(settings, script)
    except BadInput as error:
        return " ".join(str(error).split())[:MAX_REASON]
    return None


def refused_strategies(own: StrategySettings, script: Script) -> dict[str, str]:
    """Return the strategies that the script does not allow, each with the reason in one line.

    own: settings of the job's strategy; the others have their defaults."""
    refused: dict[str, str] = {}
    for name, strategy in registry.strategies().items():
        settings = own if registry.of(own) is strategy else strategy.settings()
        if (why := why_refused(settings, script)) is not None:
            refused[name] = why
    return refused


class AllowedStrategies:
    """The strategies that a worker's script allows. If the session's strategy was chosen automatically and is refused,
    another one takes its place, on every rank alike: the script is the same."""

    def __init__(self, session: Session, script: Script) -> None:
        self._session, self._script = session, script
        timed = session.probe is not None and session.probe.timing is not None
        self._refused = refused_strategies(session.strategy, script) if session.link is not None or timed else {}
        if session.strategy_is_automatic or timed:
            self._fall_back()
        if session.probe is not None and timed:
            facts = self.add_facts(Prepared())
            session.probe.report_script(
                {"refused": self._refused, "tensors": facts.tensors, "device": script.device.type},
                trains=facts.strategy not in self._refused,
            )

    def add_facts(self, prepared: Prepared) -> Prepared:
        """Add what the choice of a strategy depends on to a report."""
        prepared.tensors = sum(one.requires_grad for one in self._script.model.parameters())
        prepared.gradient_density = 1.0  # until it is measured
        prepared.refused.update(self._refused)
        prepared.strategy = registry.of(self._session.strategy).name
        return prepared

    def _fall_back(self) -> None:
        """Take the first of the registry's strategies that the script allows and whose steps can be compared: `dense`,
        or `zen` for sparse gradients. If there is none, the default one raises in its check."""
        session, refused, chosen = self._session, self._refused, registry.of(self._session.strategy).name
        if chosen not in refused:
            return
        allowed = (one for one in registry.strategies().values() if one.steps_for_one and one.name not in refused)
        instead = next(allowed, registry.default())
        if instead.name == chosen:
            return
        session.fall_back(instead.settings(), refused[chosen])
        if session.place.is_main and instead.name not in refused:
            say(f"trains by {instead.name}: {chosen} was chosen automatically, and {refused[chosen]}")
