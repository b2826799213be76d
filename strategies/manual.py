"""Tables of docs/strategies.md, from what strategies declare; a test holds the page to them."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

from atoll.strategies import registry
from atoll.strategies.declaration import Declared, Strategy, StrategySettings


def strategies_table() -> str:
    """Every strategy and what it is for."""
    rows = [f"| `{each.name}` | {each.summary} |" for each in registry.strategies().values()]
    return "\n".join(["| strategy | |", "|---|---|", *rows])


def settings_table(strategy: Strategy) -> str:
    """Every setting, its meaning and its default."""
    meaning = meanings(strategy.settings)
    changes = " `atoll adjust` changes it while the job runs, on all workers from the same step."
    adjusted = dict.fromkeys(strategy.plan_parameters.adjustable(), changes)
    rows = [
        f"| `{name}` | {meaning[name]}{adjusted.get(name, '')} | {_default(field.default)} |"
        for name, field in strategy.settings.model_fields.items()
    ]
    return "\n".join(["| setting | | default |", "|---|---|---|", *rows])


def metrics_table(strategy: Strategy) -> str:
    """Every number that workers report of a step, and how `atoll status` sums it up."""
    rows = [f"| `{each.name}` | {each.unit} | {each.meaning} | {each.summary} |" for each in strategy.metrics]
    return "\n".join(["| of a step | unit | | in all |", "|---|---|---|---|", *rows])


def meanings(settings: type[StrategySettings]) -> dict[str, str]:
    """Return the docstring below each field on one line, by the field's name. Only manual and help need them: pydantic
    would read every class's source in every process."""
    found = {}
    for declared in (each for each in reversed(settings.__mro__) if issubclass(each, Declared)):
        (definition,) = ast.parse(inspect.getsource(declared)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(meaning))):
                    found[name] = " ".join(meaning.split())
    return found


def _default(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
