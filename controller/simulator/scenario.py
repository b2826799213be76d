"""Scenario file of a cluster in simulated time, checked before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from atoll.controller.planners.time_to_accuracy.surrogate import Surrogate
from atoll.errors import BadInput
from atoll.host.documents import explain, read_toml
from atoll.strategies import registry
from atoll.strategies.declaration import StrategySettings, load

BENCHMARK_KINDS: Final = ("failures", "volunteers")
"""Kinds of scenarios that benchmarks of a clone simulate."""
MAX_DEVICES: Final = 10_000
MAX_TENSORS: Final = 512
NEEDS: Final = {
    "sparse": "rows, width, density, density_of_all",
    "compression": "ratio, compress, decompress, tensors",
    "learning.extra": "what compression costs",
}
"""Tables that strategies ask for, and their fields."""
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_MAX_ENTRIES: Final = 10_000

_Name = Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")]
_Positive = Annotated[StrictFloat | StrictInt, Field(gt=0, le=1e12, allow_inf_nan=False)]
_Seconds = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Count = Annotated[StrictInt, Field(ge=1, le=2**40)]
_Share = Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Checked = TypeVar("Checked", bound=Section)


class DeviceSection(Section):
    """`[[devices]]`: `count` alike. Costs are a preset's, or (q, s, k, m), or (alpha, beta)."""

    preset: _Name | None = None
    name: _Name | None = None
    count: Annotated[StrictInt, Field(ge=1, le=MAX_DEVICES)] = 1
    island: _Name = "a"
    q: _Seconds | None = None
    s: _Seconds | None = None
    k: _Seconds | None = None
    m: _Seconds | None = None
    alpha: _Positive | None = None
    beta: _Positive | None = None
    max_batch: _Count | None = None
    speed: _Positive = 1.0
    dense_s: _Seconds = 0.0
    """Device seconds of a step if every entry were exchanged, in proportion for the part that is sent."""

    noise: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)] = 0.03
    """Sigma of the log-normal factor on each part of a step."""

    spikes: _Share = 0.0
    """Probability that a step takes `spike_factor` times as long."""

    spike_factor: Annotated[StrictFloat | StrictInt, Field(ge=1, le=1000)] = 3.0
    joins_s: _Seconds = 0.0
    leaves_s: _Positive | None = None

    @model_validator(mode="after")
    def _one_cost(self) -> DeviceSection:
        linear = [name for name in "qskm" if getattr(self, name) is not None]
        curve = [name for name in ("alpha", "beta") if getattr(self, name) is not None]
        ways = [bool(self.preset), bool(linear), bool(curve)]
        if sum(ways) != 1 or 0 < len(linear) < 4 or len(curve) == 1:
            raise ValueError("needs either preset, or all of q, s, k, m, or alpha and beta")
        if linear and not (self.q or 0) + (self.k or 0) > 0:
            raise ValueError("has q + k = 0: a sample must take time")
        if self.leaves_s is not None and self.leaves_s <= self.joins_s:
            raise ValueError(f"leaves_s = {self.leaves_s:g} must be later than joins_s = {self.joins_s:g}")
        return self


class LinkSection(Section):
    """`[links.ISLAND]`: rate of the island's link to the others, each way."""

    mbit_s: _Positive | None = None
    trace: StrictStr | None = None
    """A CSV of `seconds,mbit_s`; its path is relative to the scenario."""

    @model_validator(mode="after")
    def _one_rate(self) -> LinkSection:
        if (self.mbit_s is None) == (self.trace is None):
            raise ValueError("needs either mbit_s or trace")
        return self


class ChangeSection(Section):
    """`[[changes]]`: another speed of a device (all of the name), or another rate of a link, from `at_s` on."""

    at_s: _Seconds
    device: _Name | None = None
    speed: _Positive | None = None
    island: _Name | None = None
    mbit_s: _Positive | None = None

    @model_validator(mode="after")
    def _one_change(self) -> ChangeSection:
        given = (self.device is not None, self.speed is not None, self.island is not None, self.mbit_s is not None)
        if given not in {(True, True, False, False), (False, False, True, True)}:
            raise ValueError("needs either device and speed, or island and mbit_s")
        return self


class OverlapSection(Section):
    """`[overlap]`: the all-reduces of strategy dense, a ring over mbit_s."""

    gamma: _Share = 0.2
    mbit_s: _Positive = 10_000.0
    """Rate within an island; between islands their links count."""

    bucket_mib: _Positive = 25.0
    noise: Annotated[StrictFloat | StrictInt, Field(ge=0, le=1, allow_inf_nan=False)] = 0.05


class SparseSection(Section):
    """`[sparse]`: all tables with sparse gradients, for strategy zen. Their entries are among the model's."""

    rows: _Count
    width: _Count
    density: _Share
    """Share of the rows in one rank's gradient; between islands, in an island's."""

    density_of_all: _Share
    """Share of the rows in the sum of all ranks."""

    skew: Annotated[StrictFloat | StrictInt, Field(ge=1, le=1e5, allow_inf_nan=False)] = 1.0
    distinct: _Share = 1.0
    """Share of a rank's rows whose gradient repeats no other row's."""

    @model_validator(mode="after")
    def _grows(self) -> SparseSection:
        if self.density_of_all < self.density:
            raise ValueError(f"density_of_all = {self.density_of_all:g} must be at least density = {self.density:g}")
        return self


class TensorSection(Section):
    """`[[compression.tensors]]`: `count` alike, neighbours in the order of the backward pass."""

    count: Annotated[StrictInt, Field(ge=1, le=MAX_TENSORS)] = 1
    bytes: Annotated[StrictInt, Field(ge=1, le=2**50)]
    """Bytes of each gradient in float32."""

    backward: _Positive
    """Time of each in the backward pass, relative to the others."""


_Cost = tuple[_Seconds, _Share]


class CompressionSection(Section):
    """`[compression]`: a model's tensors and the cost of compressing them, for strategy compressed. Costs are seconds,
    and seconds a byte of the gradient."""

    ratio: Annotated[StrictFloat | StrictInt, Field(gt=0, le=64, allow_inf_nan=False)]
    """Compressed bytes for each byte of a gradient."""

    compress: _Cost
    decompress: _Cost
    """Cost on the device of the backward pass; in its thread, where that is the CPU."""

    compress_cpu: _Cost | None = None
    decompress_cpu: _Cost | None = None
    """Cost on the CPU beside it; the same where left out."""

    latency_s: _Seconds = 0.0005
    """Seconds of latency of an exchange among all."""

    tensors: Annotated[tuple[TensorSection, ...], Field(min_length=1, max_length=MAX_TENSORS)]

    @model_validator(mode="after")
    def _few_enough(self) -> CompressionSection:
        if len(self.bytes_of_each) > MAX_TENSORS:
            raise ValueError(f"has {len(self.bytes_of_each)} tensors, more than {MAX_TENSORS}")
        return self

    @property
    def bytes_of_each(self) -> tuple[int, ...]:
        return tuple(one.bytes for one in self.tensors for _ in range(one.count))

    @property
    def backward_of_each(self) -> tuple[float, ...]:
        return tuple(float(one.backward) for one in self.tensors for _ in range(one.count))


class LearningSection(Section):
    """`[learning]`: worth of a sample. Progress is counted in samples of the initial batch."""

    samples: _Positive = 1_000_000
    """Progress at which the run ends."""

    initial_batch: _Count | None = None
    """Batch in which progress counts: the model's, or the total batch, where left out."""

    noise_scale: tuple[_Positive, _Positive] = (1000.0, 1000.0)
    """Gradient noise scale in samples at the start and at the end; geometric in between."""

    batches: tuple[_Count, _Count] | None = None
    """Total batches that a policy may choose from, lowest and highest; the total batch alone where left out."""

    rule: Literal["adascale", "square-root"] = "adascale"
    extra: Surrogate | None = None
    """`[learning.extra]`: g(r, X) on a grid, a row per sparsity: extra samples that compression and staleness need."""

    @model_validator(mode="after")
    def _ordered(self) -> LearningSection:
        if self.batches is not None and self.batches[0] > self.batches[1]:
            raise ValueError(f"batches = {list(self.batches)} must be lowest and highest")
        return self


class Scenario(Section):
    """Whole scenario file of devices."""

    name: _Name = "scenario"
    strategy: StrictStr = registry.default().name
    strategy_settings: StrategySettings = StrategySettings()
    """Settings from the strategy's own table, as in a job file."""

    model: _Name | None = None
    """A preset: entries and initial batch, and with device presets what a sample costs."""

    entries: Annotated[StrictInt, Field(ge=1, le=10**13)] | None = None
    cluster: _Name | None = None
    """A preset of devices, in one island, before those of the file."""

    total_batch: _Count
    policies: Annotated[tuple[StrictStr, ...], Field(min_length=1, max_length=32)] = ("even", "optperf")
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    decide_s: _Positive = 1.0
    """Simulated seconds between two deliveries of telemetry, after which a policy decides."""

    admission: StrictBool = False
    """True: a device joins only if the controller's admission accepts it."""

    restart_s: _Seconds = 3.0
    """Seconds that a join or a leave costs all ranks."""

    max_s: _Positive = 1e6
    max_steps: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 100_000
    devices: Annotated[tuple[DeviceSection, ...], Field(max_length=_MAX_ENTRIES)] = ()
    links: Annotated[dict[_Name, LinkSection], Field(max_length=_MAX_ENTRIES)] = {}
    changes: Annotated[tuple[ChangeSection, ...], Field(max_length=_MAX_ENTRIES)] = ()
    overlap: OverlapSection = OverlapSection()
    learning: LearningSection = LearningSection()
    sparse: SparseSection | None = None
    compression: CompressionSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_table(cls, data: Any) -> Any:
        """Read the strategy's own table."""
        if (kind := data.get("kind")) in BENCHMARK_KINDS:
            raise ValueError(
                f"kind = {kind!r} is not simulated here. In a clone: python benchmarks/disruptions.py FILE"
            )
        simulated = {name: each for name, each in registry.strategies().items() if each.simulator}
        strategy = simulated.get(data.get("strategy", registry.default().name))
        if strategy is None:
            raise ValueError(f"strategy = {data['strategy']!r} is wrong. Use one of {', '.join(simulated)}")
        try:
            settings = strategy.settings.model_validate(data.get(strategy.section, {}))
        except ValidationError as error:
            why = explain(strategy.settings, error.errors(include_url=False))
            raise ValueError(f"[{strategy.section}] {why}") from error
        rest = {name: value for name, value in data.items() if name != strategy.section}
        return {"strategy_settings": settings} | rest

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if not self.devices and self.cluster is None:
            raise ValueError("a scenario needs [[devices]] or a cluster")
        steps = load(registry.find(self.strategy).simulator)
        there = {"sparse": self.sparse, "compression": self.compression, "learning.extra": self.learning.extra}
        for table in steps.needs:
            if there[table] is None:
                raise ValueError(f"strategy = {self.strategy!r} needs [{table}]: {NEEDS[table]}")
        if self.entries is None and self.model is None and self.compression is None:
            raise ValueError("a scenario needs entries (trained parameters), or a model")
        if self.sparse is not None and self.entries is not None and self.sparse.rows * self.sparse.width > self.entries:
            raise ValueError(f"sparse has more entries than the model's {self.entries}")
        if self.compression is not None and self.entries not in {None, sum(self.compression.bytes_of_each) // 4}:
            raise ValueError(f"entries = {self.entries} is not that of [compression]'s tensors. Leave it out")
        return self

    def first_params(self) -> dict[str, Any]:
        """Return the first plan's parameters for the strategy."""
        names = registry.find(self.strategy).plan_parameters.adjustable()
        return {name: value for name, value in self.strategy_settings.said().items() if name in names}


def read(path: Path) -> dict[str, Any]:
    """Read a scenario file. Raises NotFound, or BadInput where it is not TOML."""
    document, _ = read_toml("scenario", path, _MAX_FILE_BYTES, large="Use count = N for devices that are alike")
    return document


def check(root: type[Checked], document: dict[str, Any], where: str) -> Checked:
    """Return a document as `root`. Raises BadInput naming file, the first wrong field and the nearest valid one."""
    try:
        return root.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"scenario {where}: {explain(root, error.errors(include_url=False))}") from error
