from __future__ import annotations

from atoll.strategies.declaration import Shown


def status(shown: Shown) -> list[str]:
    return [f"strength {shown.metrics.get('toy_strength', 0):g}"]
