"""Check of a script before strategy `compressed` trains it."""

from __future__ import annotations

from atoll.agent.runtime.model.inputs import SeveralModels
from atoll.agent.runtime.model.model_state import plain_parameters
from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.strategies.declaration import StrategySettings


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for several models, and for a model on several devices."""
    if isinstance(script.model, SeveralModels):
        raise BadInput("strategy compressed trains one model; several go with strategy dense")
    devices = {one.device for _, one in plain_parameters(script.model) if one.requires_grad}
    if len(devices) > 1:
        raise BadInput(
            f"strategy compressed takes models on one device; this one's parameters are on {len(devices)}: "
            f"{', '.join(sorted(map(str, devices)))}"
        )
