"""The form in which a strategy says what it is: settings, plan parameters, metrics, and where its parts lie.

Imports no torch: command line, controller and agents read it as well as workers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from atoll.errors import BadInput, SettingError

MAX_JSON_BYTES: Final = 16 * 1024
"""Size limit of settings, plan parameters or a message as JSON."""

ADJUSTABLE: Final = "adjustable"
"""Mark of a plan parameter that users may set while a job runs, by `atoll adjust`."""

Summary: TypeAlias = Literal["newest", "mean", "share of the step"]
DeclaredT = TypeVar("DeclaredT", bound="Declared")


class Declared(BaseModel):
    """Fields with types, limits, defaults and meanings, each said here and nowhere else.

    Made by hand it raises SettingError; inside another model's input pydantic's own error, which knows the place."""

    # Built when first used: a process uses few of the strategies that it imports.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    if not TYPE_CHECKING:

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise setting_error(type(self), error) from error

        __init__.__pydantic_base_init__ = True  # pydantic calls it for input from outside otherwise

    def with_values(self, **values: Any) -> Self:
        """The same with other values. Raises SettingError."""
        return type(self)(**{**self.model_dump(), **values})

    def said(self) -> dict[str, Any]:
        """Every field that has a value, as JSON holds it."""
        return self.model_dump(mode="json", exclude_none=True)


class StrategySettings(Declared):
    """Base of a strategy's settings: its table in a job file, its options of `atoll submit`, and the manual's table.

    The docstring below a field is its text in the help and in the manual: sentences that begin with a verb."""

    @property
    def stages_of_model(self) -> int:
        """Parts that the model is cut into, each on a worker of its own."""
        return 1

    @property
    def makes_rounds(self) -> bool:
        """Return True if replicas make updates of their own, and are equal at a round's end. For engines."""
        return True


class PlanParameters(Declared):
    """Base of what a plan tells a strategy. A field that is None is as in the plan before. What users may set, pin or
    leave to the controller is ADJUSTABLE and a setting of the same name; the rest is between a strategy's two halves.
    """

    FOLLOWS: ClassVar[tuple[str, ...]] = ()
    """Settings among those that the controller decides unless the job sets them."""

    @classmethod
    def adjustable(cls) -> tuple[str, ...]:
        """Return the names of the ADJUSTABLE fields."""
        return tuple(name for name, field in cls.model_fields.items() if ADJUSTABLE in field.metadata)

    def over(self, before: Self) -> Self:
        """These, and where they say nothing those of the plan before."""
        said = self.model_dump(exclude_none=True)
        return self.model_copy(update={name: value for name, value in before if name not in said})


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that workers report of every step. `unit`: "s", "bytes", "count", or "share" for 0 to 1.

    summary: what `atoll status` is told: rank 0's newest, the mean of all ranks' latest steps, or which share of these
    steps it took (of seconds)."""

    name: str
    unit: Literal["s", "bytes", "count", "share"]
    meaning: str
    summary: Summary = "mean"

    @property
    def most(self) -> float:
        """The largest value that makes sense."""
        return 1.0 if self.unit == "share" else sys.float_info.max

    @property
    def summary_name(self) -> str:
        return f"{self.name.removesuffix('_s')}_share" if self.summary == "share of the step" else self.name


class Scheduler(Protocol):
    """Answers messages of a run's workers, in the controller: pure, time is an argument. After a change of leader a
    run has a new, empty one."""

    @property
    def due_s(self) -> float | None:
        """Return the latest time for a call of `passed`, by the clock of `heard`; None: not before another message."""

    def heard(self, rank: int, message: Any, now_s: float) -> Iterable[tuple[int, Declared]]:
        """Answers by rank, of this worker or others. message: of the type that the strategy registered. now_s: of a
        monotonic clock."""

    def passed(self, now_s: float) -> Iterable[tuple[int, Declared]]:
        """Answers that were due by now."""

    def take_notices(self, now_s: float) -> Iterable[str]:
        """Return sentences for `atoll events` since the last call. Called after each message: mostly empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of a strategy's step, for planner `strategy`. kind: what workers exchange (its ExchangeKind).
    value_bytes: of a value on the wire. density: share of the values that is sent."""

    kind: Literal["gradients", "compressed-gradients", "nonzeros", "updates", "differences"]
    value_bytes: float = 4.0
    density: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Inputs of a strategy's view of a job. planned: of the newest plan, None before the first. metrics: summaries
    of workers' reports, empty before their first step."""

    settings: StrategySettings
    planned: PlanParameters | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Declaration of a strategy, known to all parts. Parts are named "module:object" and loaded where they are used."""

    name: str
    summary: str
    """One line for the manual."""

    settings: type[StrategySettings]
    plan_parameters: type[PlanParameters] = PlanParameters
    """Schema of a plan's parameters."""

    message: type[Declared] | None = None
    """Schema of messages between workers and the controller half; None without messages."""

    metrics: tuple[Metric, ...] = ()
    exchanges: bool = False
    """True if workers exchange more than collectives: they get keys and the list of all members."""

    relayed: bool = False
    """True if its workers can train where some of them reach each other through the relay alone."""

    kept_state: str = ""
    """Kind of what it keeps beside model and optimizer, empty if nothing. Strategies of one kind take it over from each
    other's checkpoints."""

    switchable: bool = False
    """True if a run may leave it for another such strategy at a step boundary, and come to it from there."""

    worker: str
    """Makes the worker half."""

    script_check: str = ""
    """Function from settings and a Script (agent.runtime.strategy_interface.script_checks) that raises BadInput for a
    model, optimizers or data that the strategy cannot train; empty if `engine` and `sparse_gradients` say all."""

    engine: bool = False
    """True if it makes passes and updates itself: the script calls run.prepare_pipeline."""

    sparse_gradients: bool = False
    """True if it sums sparse gradients, which other strategies refuse."""

    volunteer: str = ""
    """The volunteer's part, which runs in the worker half's place until it is needed no more; empty if none may
    help. From session, model and EngineParts to an exit code."""

    controller: str = ""
    """The controller half, atoll.controller.deciding.given; empty where the split of the batch is all there
    is to decide."""

    steps_for_one: float = 0.0
    """Steps to a loss for one of `dense`, by the default settings, as benchmarks/race.py measured: the middle of its
    tasks (docs/planners.md). 0: such steps cannot be compared."""

    steps_range: tuple[float, float] = (1.0, 1.0)
    """The least and the most of these steps that a task took."""

    exchange: Traffic | None = None
    """Traffic of a step by the default settings; None: a controller does not choose this strategy."""

    steps_of_plan: str = ""
    """Function from settings and the newest plan's parameters (None before the first) to the number of its steps
    that teach as much as one with default settings; empty: one."""

    scheduler: str = ""
    """Makes the Scheduler of a run, from the job's settings; empty where none answers."""

    simulator: str = ""
    """Its model of a step, atoll.controller.simulator.steps; empty if it cannot be simulated."""

    trial_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a trial of `atoll profile`, beside its sparsity; empty where there is nothing to measure."""

    view: str = ""
    """Function from Shown to the parts of a line of `atoll status`; empty for none."""

    @property
    def asks_for_each_step(self) -> bool:
        """Return True if the controller needs every rank's steps one by one, for metrics or its controller half.
        Else agents report estimates."""
        return bool(self.metrics or self.controller)

    @property
    def section(self) -> str:
        """Name of its table in a job file."""
        return self.name.replace("-", "_")

    def read_settings(self, text: str, where: str = "strategy_settings") -> StrategySettings:
        """Read settings from JSON; missing fields have their defaults. Raises BadInput."""
        return read(self.settings, text, where)

    def check_settings(self, said: Mapping[str, Any], where: str) -> None:
        """Raises SettingError."""
        try:
            self.settings.model_validate(dict(said))
        except ValidationError as error:
            raise setting_error(self.settings, error, where) from error

    def read_plan_parameters(self, text: str, where: str = "strategy_params") -> PlanParameters:
        """Read plan parameters from JSON. Raises BadInput."""
        return read(self.plan_parameters, text, where)


def as_json(values: Mapping[str, Any]) -> str:
    """Return JSON that `read` accepts. Equal values give equal text, and no values give empty text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False) if values else ""


def load(path: str) -> Any:
    """The object that "module:object" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def read(model: type[DeclaredT], text: str, where: str) -> DeclaredT:
    """The model that JSON from another machine describes; empty text is all defaults. Raises BadInput naming the
    field."""
    if len(text) > MAX_JSON_BYTES:
        raise BadInput(f"{where} has {len(text)} characters, at most {MAX_JSON_BYTES} are taken")
    try:
        return model.model_validate_json(text or "{}")
    except ValidationError as error:
        raise setting_error(model, error, where) from error


def setting_error(model: type[Declared], error: ValidationError, where: str = "") -> SettingError:
    """The first thing that is wrong, in the words of the project."""
    first = error.errors(include_url=False)[0]
    field = ".".join([*([where] if where else []), *(str(part) for part in first["loc"])])
    if not first["loc"]:
        return SettingError(field or model.__name__, first["input"], said(first), "See the manual, docs/strategies.md")
    if first["type"] == "extra_forbidden":
        return SettingError(field, first["input"], "is not known", f"Known: {', '.join(model.model_fields) or 'none'}")
    known = model.model_fields.get(str(first["loc"][0]))
    default = "" if known is None or known.is_required() else f"Leave it out for {known.default}"
    return SettingError(field, first["input"], said(first), default or "See the manual, docs/strategies.md")


def said(error: ErrorDetails) -> str:
    """Return pydantic's finding as the end of a sentence about the value."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return error["msg"].replace("Input should", "should").replace("Value error, ", "")
