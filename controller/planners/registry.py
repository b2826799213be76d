"""Registry of planners by name: typed values within the process, JSON for people and records.

`atoll decide NAME` reads a recorded input and prints the recorded answer again, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from atoll.controller.planners.batches.admission import AdmissionInput, plan_admission
from atoll.controller.planners.batches.gns import GnsInput, estimate_gns
from atoll.controller.planners.batches.goodput import GoodputInput, plan_goodput
from atoll.controller.planners.batches.optperf import OptPerfInput, plan_optperf
from atoll.controller.planners.batches.splits import EvenInput, InverseTimeInput, split_by_inverse_time, split_evenly
from atoll.controller.planners.checkpoint_placement.placement import PlacementInput, plan_placement
from atoll.controller.planners.islands.clusters import IslandsInput, plan_islands
from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput, plan_exchange_density
from atoll.controller.planners.islands.one_island import OneIslandInput, compare_one_island
from atoll.controller.planners.islands.thin_island import ThinIslandInput, compare_thin_island
from atoll.controller.planners.pipelines.allocation import AllocationInput, plan_allocation
from atoll.controller.planners.pipelines.groups import GroupsInput, plan_groups
from atoll.controller.planners.strategy_choice.facts import StrategyInput
from atoll.controller.planners.strategy_choice.strategy import plan_strategy
from atoll.controller.planners.tensor_compression.compression import CompressionInput, plan_compression
from atoll.controller.planners.tensor_compression.fusion import FusionInput, plan_fusion
from atoll.controller.planners.tensor_compression.tensor_groups import GroupingPlan, plan_grouping
from atoll.controller.planners.time_to_accuracy.tta import TtaInput, plan_tta
from atoll.planning.chunks import ChunksInput, plan_chunks
from atoll.planning.schemas import canonical, read
from atoll.planning.sparse_scheme import SparseSchemeInput, plan_sparse_scheme
from atoll.planning.stage_cut import StagesInput, plan_stages

Given = TypeVar("Given")
Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class Decision(Generic[Given, Plan]):
    """A planner's answer and its input. input, output: both as the text that records keep."""

    planner: Planner[Given, Plan]
    given: Given
    plan: Plan

    @property
    def input(self) -> str:
        return canonical(self.given)

    @property
    def output(self) -> str:
        return canonical(self.plan, omit_none=self.planner.omits_none)


@dataclass(frozen=True, slots=True)
class Planner(Generic[Given, Plan]):
    """A planner. schema: type of its input. example: a valid input, shown by `atoll decide`. omits_none: the JSON of a
    plan leaves out fields that are None."""

    name: str
    summary: str
    example: str
    schema: type[Given]
    plan: Callable[[Given], Plan]
    omits_none: bool = False

    def decide(self, given: Given) -> Decision[Given, Plan]:
        """Raises NoFeasiblePlan."""
        return Decision(self, given, self.plan(given))

    def read(self, text: str) -> Given:
        """Return its input from JSON. Raises BadInput naming the field."""
        return read(self.schema, text, f"the input of planner {self.name}", f"Example: {self.example}")

    def run_json(self, text: str) -> str:
        """Plan from JSON to JSON (sorted keys, no line break). Raises BadInput naming the field, or NoFeasiblePlan."""
        return self.decide(self.read(text)).output


_TWO_NODES: Final = (
    '"gamma": 0.2, "t_o": 0.03, "t_u": 0.005, "nodes": [{"q": 0.0002, "s": 0.004, "k": 0.0004, "m": 0.002}, '
    '{"q": 0.0006, "s": 0.004, "k": 0.0012, "m": 0.002, "max_batch": 64}]'
)

EVEN: Final = Planner(
    "even",
    "the same batch for every node, within bounds",
    '{"total_batch": 256, "nodes": 3}',
    EvenInput,
    split_evenly,
)
INVERSE_TIME: Final = Planner(
    "inverse-time",
    "batches in inverse proportion to each node's time per sample",
    '{"total_batch": 256, "nodes": [{"seconds_per_sample": 0.001}, {"seconds_per_sample": 0.002}]}',
    InverseTimeInput,
    split_by_inverse_time,
)
OPTPERF: Final = Planner(
    "optperf",
    "the split with the shortest step, from each node's fixed and per-sample times and what overlaps",
    f'{{"total_batch": 256, {_TWO_NODES}}}',
    OptPerfInput,
    plan_optperf,
)
GNS: Final = Planner(
    "gns",
    "the gradient noise scale, from squared norms of nodes with unequal batches",
    '{"batches": [48, 16], "local_sqnorms": [1.5, 2.5], "global_sqnorm": 1.25}',
    GnsInput,
    estimate_gns,
)
GOODPUT: Final = Planner(
    "goodput",
    "the total batch that learns fastest, its split, and the learning rate's factor",
    f'{{"candidates": [128, 256, 512], "noise_scale": 900, "initial_batch": 128, {_TWO_NODES}}}',
    GoodputInput,
    plan_goodput,
)
TTA: Final = Planner(
    "tta",
    "sparsity and batches for the least time to accuracy over thin links",
    '{"devices": [{"alpha": 28, "beta": 300, "max_batch": 128}, {"alpha": 20, "beta": 99, "max_batch": 64, '
    '"island": 1}], "bandwidths": [12500000, 12500000], "entries": 86000000, "samples": 1000000, "surrogate": '
    '{"sparsities": [0.9, 0.99, 0.999], "batches": [32, 128, 512], '
    '"extra": [[0.0, 0.01, 0.1], [0.02, 0.04, 0.15], [0.1, 0.2, 0.4]]}}',
    TtaInput,
    plan_tta,
)
ADMISSION: Final = Planner(
    "admission",
    "which of the devices that offer themselves make the run faster, and why",
    f'{{"candidates": [256], "noise_scale": 900, "initial_batch": 256, "uncertainty": 0.03, {_TWO_NODES}, '
    '"offers": [{"name": "slow", "q": 0.01, "s": 0.1, "k": 0.02, "m": 0.05, "uncertainty": 0.05}]}',
    AdmissionInput,
    plan_admission,
)
PLACEMENT: Final = Planner(
    "placement",
    "whose memory holds the replicas of whose checkpoint, and how probable recovery from memory is",
    '{"machines": [{"host": "a"}, {"host": "a"}, {"host": "b"}, {"host": "b"}], "replicas": 2}',
    PlacementInput,
    plan_placement,
    omits_none=True,
)
CHUNKS: Final = Planner(
    "chunks",
    "when a checkpoint is sent: in chunks that fit between the training's own traffic",
    '{"idle_spans": [0.05, 0.2, 0.1], "checkpoint_bytes": 30000000, "replicas": 2, "buffers": 4, '
    '"buffer_bytes": 32000000, "bandwidth": 125000000, "alpha": 0.0005, "mu": 0.9}',
    ChunksInput,
    plan_chunks,
)
COMPRESSION: Final = Planner(
    "compression",
    "for each tensor whether it is compressed, where, and how it is sent",
    '{"forward_s": 0.02, "tensors": [{"bytes": 4000000, "backward_s": 0.004}, {"bytes": 8000, "backward_s": 0.001}, '
    '{"bytes": 9000000, "backward_s": 0.006}], "options": [{"name": "none", "tasks": [{"on": "link", "alpha": 0.001, '
    '"beta": 8e-08}]}, {"name": "int4 on gpu", "tasks": [{"on": "gpu", "alpha": 0.0002, "beta": 1e-09}, '
    '{"on": "link", "alpha": 0.001, "beta": 8e-08, "factor": 0.125}, {"on": "gpu", "alpha": 0.0002, "beta": 1e-09}]}]}',
    CompressionInput,
    plan_compression,
)
FUSION: Final = Planner(
    "fusion",
    "which tensors are compressed and sent as one",
    '{"tensors": [{"bytes": 4000000, "backward_s": 0.004}, {"bytes": 8000, "backward_s": 0.001}, '
    '{"bytes": 9000000, "backward_s": 0.006}], "forward_s": 0.02, "compress": {"alpha": 0.0002, "beta": 1e-09, '
    '"floor_bytes": 4000000}, "communicate": {"alpha": 0.001, "beta": 1e-08}}',
    FusionInput,
    plan_fusion,
)
TENSOR_GROUPS: Final[Planner[CompressionInput, GroupingPlan]] = Planner(
    "tensor-groups",
    "which tensors are synchronised as one, and how: compression and fusion in turns",
    COMPRESSION.example,
    CompressionInput,
    plan_grouping,
)
STAGES: Final = Planner(
    "stages",
    "which layers of a model each device of a pipeline holds",
    '{"layers": [{"forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 4000000, "activation_bytes": 65536}, '
    '{"forward_s": 0.02, "backward_s": 0.04, "parameter_bytes": 8000000, "activation_bytes": 65536}, '
    '{"forward_s": 0.01, "backward_s": 0.02, "parameter_bytes": 4000000, "activation_bytes": 1024}], '
    '"devices": [{"speed": 1, "memory_bytes": 16000000}, {"speed": 0.5, "memory_bytes": 16000000}], '
    '"links": [{"bandwidth": 12500000, "latency": 0.001}]}',
    StagesInput,
    plan_stages,
)
GROUPS: Final = Planner(
    "groups",
    "which replicas of a stage average together and when, replayed for given times",
    '{"replicas": 3, "window_s": 0.1, "history": 3, "average_s": 0.05, "until_s": 4, '
    '"iteration_s": [[0.5, 0.55, 1.6]]}',
    GroupsInput,
    plan_groups,
)
SPARSE_SCHEME: Final = Planner(
    "sparse-scheme",
    "how a sparse tensor is summed over workers, from its densities, its skew and the link",
    '{"workers": 4, "entries": 375000, "densities": [0.02, 0.036, 0.05, 0.062], "skew": 2.6, "value_bytes": 256, '
    '"index_bytes": 4, "bandwidth": 12500000, "latency": 0.0005}',
    SparseSchemeInput,
    plan_sparse_scheme,
)
EXCHANGE_DENSITY: Final = Planner(
    "exchange-density",
    "how much of its model an island sends of a step through aggregators",
    '{"entries": 25000000, "bandwidths": [12500000, 12500000, 2500000], "step_s": 0.4, "value_bytes": 0.2578125, '
    '"enough": 0.4}',
    ExchangeDensityInput,
    plan_exchange_density,
)
ONE_ISLAND: Final = Planner(
    "one-island",
    "whether one island with all the data would be sooner than all of them together",
    '{"islands": [{"name": "home", "batch": 64, "compute_s": 0.4}, {"name": "lab", "batch": 192, "compute_s": 0.4}], '
    '"exchange": {"bytes": 100000000, "bandwidth": 12500000, "hidden": 0.5}}',
    OneIslandInput,
    compare_one_island,
)
THIN_ISLAND: Final = Planner(
    "thin-island",
    "whether all islands but the one with the thinnest link would learn sooner",
    '{"islands": [{"name": "home", "batch": 64, "compute_s": 0.4}, {"name": "lab", "batch": 192, "compute_s": 0.4}, '
    '{"name": "office", "batch": 64, "compute_s": 0.4}], "exchange": {"entries": 25000000, "bandwidths": [250000, '
    '12500000, 12500000], "step_s": 0.4, "value_bytes": 0.2578125, "enough": 0.2}}',
    ThinIslandInput,
    compare_thin_island,
)
ISLANDS: Final = Planner(
    "islands",
    "which nodes are one island, from measured round-trip times and bandwidths between nodes",
    '{"nodes": [{"name": "a", "host": "h1"}, {"name": "b", "host": "h2"}, {"name": "c", "host": "h3"}], "pairs": '
    '[{"from_node": "a", "to_node": "b", "rtt_s": 0.0002, "bandwidth_bps": 940000000.0}, {"from_node": "a", '
    '"to_node": "c", "rtt_s": 0.02, "bandwidth_bps": 50000000.0, "back_bps": 10000000.0}]}',
    IslandsInput,
    plan_islands,
)
ALLOCATION: Final = Planner(
    "allocation",
    "which reliable device holds which stage of a pipeline, and which stage each volunteer helps",
    '{"devices": [{"power": 4, "reliable": true}, {"power": 4, "reliable": true}, {"power": 2, "reliable": false}], '
    '"delay": [[0, 0.02, 0.03], [0.02, 0, 0.01], [0.03, 0.01, 0]], "bandwidth": [[0, 12500000, 2500000], '
    '[12500000, 0, 6250000], [2500000, 6250000, 0]], "activation_bytes": 2097152, "layer_costs": [0.5, 0.5, 0.5, 0.5, '
    '0.5], "parameter_bytes": 400000000, "batch": 16}',
    AllocationInput,
    plan_allocation,
)
STRATEGY: Final = Planner(
    "strategy",
    "the strategy that reaches a loss soonest, from measured computing, links and what a step teaches",
    '{"islands": [{"name": "home", "ranks": [{"compute_s": 0.5, "batch": 64}]}, {"name": "lab", "ranks": '
    '[{"compute_s": 0.4, "batch": 64}]}], "links": [{"source": "home", "target": "lab", "bandwidth_bps": 100000000, '
    '"rtt_s": 0.02}], "entries": 25000000, "candidates": [{"name": "dense", "exchange": "gradients"}, '
    '{"name": "local-steps", "exchange": "differences", "value_bytes": 0.2578125, "density": 0.2, "steps": 1.08, '
    '"least_steps": 0.92, "most_steps": 1.3}]}',
    StrategyInput,
    plan_strategy,
)

PLANNERS: Final[Mapping[str, Planner[Any, Any]]] = {
    planner.name: planner
    for planner in (
        *(EVEN, INVERSE_TIME, OPTPERF, GNS, GOODPUT, TTA, ADMISSION, PLACEMENT, CHUNKS),
        *(COMPRESSION, FUSION, TENSOR_GROUPS, STAGES, GROUPS, SPARSE_SCHEME, EXCHANGE_DENSITY, ONE_ISLAND, THIN_ISLAND),
        *(ALLOCATION, ISLANDS, STRATEGY),
    )
}
