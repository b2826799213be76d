"""Tables of docs/strategies.md, from what strategies declare; a test holds the page to them."""

from __future__ import annotations

from atoll.strategies import registry
from atoll.strategies.declaration import Strategy


def strategies_table() -> str:
    """Every strategy and what it is for."""
    rows = [f"| `{each.name}` | {each.summary} |" for each in registry.strategies().values()]
    return "\n".join(["| strategy | |", "|---|---|", *rows])


def settings_table(strategy: Strategy) -> str:
    """Every setting, its meaning and its default."""
    rows = [
        f"| `{name}` | {' '.join((field.description or '').split())} | {_default(field.default)} |"
        for name, field in strategy.settings.model_fields.items()
    ]
    return "\n".join(["| setting | | default |", "|---|---|---|", *rows])


def metrics_table(strategy: Strategy) -> str:
    """Every number that workers report of a step, and how `atoll status` sums it up."""
    rows = [f"| `{each.name}` | {each.unit} | {each.meaning} | {each.summary} |" for each in strategy.metrics]
    return "\n".join(["| of a step | unit | | in all |", "|---|---|---|---|", *rows])


def _default(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
