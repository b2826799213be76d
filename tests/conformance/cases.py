"""The conformance matrix: its axes, what each combination must end with, and a subset that covers every pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Final

from models import FEATURES
from optimizers import RECIPES

STRATEGIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "dense": ("dense", {}),
    "zen": ("zen", {}),
    "zen/zen": ("zen", {"scheme": "zen"}),
    "compressed/exact": ("compressed", {"min_bytes": 1 << 40}),
    "compressed": ("compressed", {"min_bytes": 0}),
    "stale-sparse/exact": ("stale-sparse", {"sparsity": 0.0, "values": "float32", "staleness": 0}),
    "stale-sparse/gradients-exact": (
        "stale-sparse",
        {"exchange": "gradients", "sparsity": 0.0, "values": "float32", "staleness": 0},
    ),
    "stale-sparse": ("stale-sparse", {}),
    "local-steps/exact": ("local-steps", {"density": 1.0, "values": "float32", "staleness": 0}),
    "local-steps": ("local-steps", {}),
    "groups/exact": ("groups", {"grouping": "all"}),
    "groups": ("groups", {}),
    "volunteer": ("volunteer", {}),
}
"""Each strategy's name and settings. Names without a slash are the defaults; `compressed` takes tensors of any size."""
ENGINES: Final = ("groups/exact", "groups", "volunteer")
"""Strategies that make passes and updates themselves. The script calls `run.prepare_pipeline`."""
OWN_LOOP: Final = ("own-backward", "no-sync", "clip-torch", "sampler", "loader-workers")
"""Wrappers that need a loop or a loader of the script's own."""

PRECISIONS: Final = ("float32", "autocast", "float16", "float16-overflow", "bfloat16", "mixed")
WRAPPERS: Final = (
    "plain", "own-backward", "accumulated", "no-sync", "clip", "clip-torch", "stream", "sampler", "compile",
    "compile-fullgraph", "loader-workers", "huggingface", "lightning", "accelerate",
)  # fmt: skip
EVENTS: Final = (
    "none", "one-worker", "shares-98-2", "empty-slice", "plan-change", "resume", "one-nan", "lost", "join",
    "helped",
)  # fmt: skip
AXES: Final[Mapping[str, Sequence[str]]] = {
    "strategy": tuple(STRATEGIES),
    "feature": tuple(FEATURES),
    "optimizer": tuple(RECIPES),
    "precision": PRECISIONS,
    "wrapper": WRAPPERS,
    "event": EVENTS,
}
CHANGED_STEP: Final = 3
"""The step from which the second plan holds, in the cases that have one."""
JOINED_STEP: Final = 8
"""The first step that the third worker trains ("join"), where each step is an update. Two have begun the run."""
TRAINERS: Final = ("huggingface", "lightning", "accelerate")
"""Wrappers that make the loop themselves: trainers of other frameworks, as they are and on Atoll's adapters."""
SLOW_WRAPPERS: Final = ("compile", "compile-fullgraph", "loader-workers", *TRAINERS)
SLOW_EVENTS: Final = ("lost", "join", "helped")
"""Values that cost seconds a case: the short subset has none of them."""

CHEAP: Final[Mapping[str, Sequence[str]]] = {
    **AXES,
    "wrapper": [one for one in WRAPPERS if one not in SLOW_WRAPPERS],
    "event": [one for one in EVENTS if one not in SLOW_EVENTS],
}
"""The axes without slow values."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    strategy: str = "dense"
    feature: str = "mlp"
    optimizer: str = "sgd"
    precision: str = "float32"
    wrapper: str = "plain"
    event: str = "none"

    def __str__(self) -> str:
        return f"{self.strategy},{self.feature},{self.optimizer},{self.precision},{self.wrapper},{self.event}"

    @property
    def world_size(self) -> int:
        """Workers that begin the run."""
        return {"one-worker": 1, "lost": 3}.get(self.event, 2)

    @property
    def processes(self) -> int:
        return 3 if self.event in {"join", "helped"} else self.world_size

    @property
    def starts_again(self) -> bool:
        """Whether the survivors of a lost worker save the last step and end, and another run resumes from there."""
        return self.event == "lost" and (self.strategy.startswith("compressed") or self.by_gradients)

    @property
    def by_gradients(self) -> bool:
        return self.strategy.startswith("stale-sparse/gradients")

    @property
    def by_rounds(self) -> bool:
        return self.strategy.startswith("groups")

    @property
    def lost_step(self) -> int:
        """Return the step in which the last worker dies; one of eight rounds where replicas make rounds."""
        return 5 if self.by_rounds else 7

    @property
    def runs(self) -> int:
        return 2 if self.event == "resume" or self.starts_again else 1

    @property
    def by_engine(self) -> bool:
        """Whether the program calls `run.prepare_pipeline`; where it cannot, it shows what `run.prepare` says."""
        loop = self.wrapper in {*OWN_LOOP, *TRAINERS} or RECIPES[self.optimizer].closure
        return self.strategy in ENGINES and not loop

    @property
    def engine_batch(self) -> int:
        """What `run.prepare_pipeline` takes: under `groups` of each replica, and a round has one of each."""
        return self.batch if self.strategy == "volunteer" else self.batch // self.world_size

    @property
    def samples(self) -> int:
        """Six batches of them. In the last one of "empty-slice" is a single sample."""
        return {"shares-98-2": 312, "empty-slice": 41}.get(self.event, 48)

    @property
    def batch(self) -> int:
        if self.event == "lost" and self.by_rounds:
            return 12  # a round is one batch of each replica, and at worst one update by their mean
        return 52 if self.event == "shares-98-2" else 8

    @property
    def shares(self) -> Sequence[float]:
        return {"shares-98-2": (0.98, 0.02), "lost": (2.0, 1.0, 1.0)}.get(self.event, (1.0,) * self.world_size)

    def slices(self, step: int) -> Sequence[int]:
        """Return how many samples of a whole batch each rank trains in a step, of a model with batch statistics."""
        if self.strategy in ENGINES:  # which replica trains a batch of a round is no plan's
            parts = self.world_size * self.micro_batches
            return (self.batch // parts,) * parts
        if self.event == "lost":
            update = self.lost_step // self.passes * self.passes  # its first step: the survivors make all of it again
            return (4, 2, 2) if step < update else (4, 4)
        if self.event == "join":
            return (4, 4) if step < JOINED_STEP else (4, 2, 2)
        if self.event == "shares-98-2":
            return (50, 2)  # a slice of one has no variance
        if self.event == "plan-change" and step >= CHANGED_STEP:
            return (6, 2)
        return (self.batch // self.world_size,) * self.world_size

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return -(-self.samples // self.batch)

    @property
    def micro_batches(self) -> int:
        """Return the passes that `run.prepare_pipeline` makes of a batch."""
        if self.event == "helped":
            return 4  # a rank is at one while its volunteer has others
        return 2 if self.wrapper == "accumulated" and self.by_engine else 1

    @property
    def other_passes(self) -> bool:
        """Whether ranks make other forward passes than plain torch, so that what these count is not compared."""
        idle = self.strategy in ENGINES and self.event == "empty-slice"
        return FEATURES[self.feature].by_slices or idle

    @property
    def order(self) -> Sequence[int]:
        """Of the samples in an epoch."""
        return range(self.samples)[::-1] if self.wrapper == "sampler" else range(self.samples)

    @property
    def passes(self) -> int:
        """Backward passes of an update."""
        return 2 if self.wrapper in {"accumulated", "no-sync"} and not self.by_engine else 1

    @property
    def sums_updates(self) -> bool:
        """Whether each rank makes its own updates, which the strategy adds up."""
        return self.strategy.startswith(("local-steps", "stale-sparse"))

    @property
    def compiler(self) -> Mapping[str, str]:
        """Return settings of torch.compile."""
        return {"backend": "aot_eager"}


@dataclass(frozen=True, slots=True)
class Refused:
    """Atoll raises BadInput, whose text matches a pattern."""

    at_prepare: Sequence[str]
    later: Sequence[str]
    """Patterns for acts of the script or the model after `run.prepare`. They count where nothing is refused there."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The weights are plain torch's, up to the order of additions."""

    deviation: float
    """Largest distance from the reference, as a share of the way that the reference went; for each tensor."""


@dataclass(frozen=True, slots=True)
class Learns:
    """All ranks end with the same weights, and the loss is within the spread of three seeds of plain torch."""


Expected = Refused | Exact | Learns


def impossible(case: Case) -> str:
    """Return why this case cannot be trained by plain torch, on this device or by the suite; empty where it can."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    if case.optimizer == "adamw-capturable" or case.feature == "sync-batch-norm":
        return "it needs a GPU"
    if feature.sparse != (case.optimizer == "sparse-adam") and (feature.sparse and not recipe.takes_sparse):
        return "the optimizer takes no sparse gradients"
    if case.feature == "float64" and case.precision in {"bfloat16", "mixed", "float16-overflow"}:
        return "its parameters and losses are float64"
    if case.feature == "lstm" and case.precision != "float32":
        return "LSTM has no 16 bits on many CPUs"
    if case.feature == "parametrized" and case.precision == "mixed":
        return "spectral_norm takes one dtype"
    if feature.sparse and case.wrapper in {"clip", "clip-torch"}:
        return "clip_grad_norm_ takes no sparse gradients"
    if case.optimizer == "sgd-fused" and feature.idle_blocks:
        return "torch's fused SGD wants all momentum buffers from its first step on"
    if case.wrapper == "compile-fullgraph" and not feature.whole_graph:
        return "torch.compile cannot trace its forward pass as one graph"
    if case.wrapper in TRAINERS and (feature.needs_loop or recipe.needs_loop or feature.by_slices):
        return "the trainer makes the loop, and takes one optimizer"
    if case.wrapper in TRAINERS and case.precision not in {"float32", "bfloat16"}:
        return "the trainer has a setting of its own for mixed precision"
    if case.event == "helped" and case.strategy != "volunteer":
        return "no other strategy takes volunteers' help"
    keeps_to_parameters = not (case.sums_updates or case.strategy.startswith("compressed"))
    if case.event == "lost" and case.feature == "clamped" and keeps_to_parameters:
        return "the script writes weights in the broken step, so the run starts again from a checkpoint of before"
    if case.wrapper in TRAINERS and case.event in SLOW_EVENTS:
        return "the trainer makes the loop, in which no worker can wait for a step"
    if recipe.closure and case.precision.startswith("float16"):
        return "a GradScaler takes no closures"
    if feature.by_slices and case.event == "empty-slice":
        return "one sample has no batch statistics"
    if case.optimizer == "sparse-adam" and not feature.sparse:
        return "SparseAdam takes sparse gradients alone"
    return ""


def expected(case: Case) -> Expected:
    """Return what the case must end with. Pure; the table of docs/supported.md is made of it."""
    at_prepare, later = _refusals(case), _later_refusals(case)
    if at_prepare or later:
        return Refused(at_prepare, later)
    return Learns() if inexact(case) else Exact(_deviation(case))


def _refusals(case: Case) -> Sequence[str]:
    """Return a pattern for each refusal at `run.prepare` that the case meets."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    by_engine = case.strategy in ENGINES
    found = {
        "call run.prepare_pipeline in place of run.prepare": by_engine and not case.by_engine,
        "has no length or no index": by_engine and case.wrapper == "stream",
        "it makes one torch.optim.Optimizer": by_engine and recipe.several,
        "BatchNorm1d needs all of a batch together": case.strategy == "volunteer" and case.feature == "batch-norm",
        "sends weights as float32": case.strategy == "volunteer" and case.feature == "float64",
        "averages float32": case.by_rounds
        and (case.feature in {"float64", "buffers"} or case.precision in {"bfloat16", "mixed"}),
        "cannot average": case.by_rounds and not recipe.averaged,
        "only real floating-point parameters can be trained": case.feature == "complex",
        "LBFGS evaluates the loss several times": case.optimizer == "lbfgs",
        "sparse": feature.sparse and not case.strategy.startswith("zen"),
        "needs dense float32, float16 or bfloat16 memory": case.feature == "float64" and case.sums_updates,
        "no sparse form": case.by_gradients and not recipe.sparse_form,
        'several optimizers with exchange = "gradients"': case.by_gradients and recipe.several,
    }
    return [text for text, holds in found.items() if holds]


def _later_refusals(case: Case) -> Sequence[str]:
    """Return a pattern for each refusal of an act after `run.prepare` that the case meets."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    float16, unfreezes = case.precision.startswith("float16"), case.optimizer == "group-added"
    found = {
        "torch.autocast in float16 needs gradients that are scaled": case.strategy in ENGINES and float16,
        "the forward pass wrote": case.strategy == "volunteer" and feature.forward_writes,
        "got other parameters after run.prepare": case.by_gradients and unfreezes,
        "on a gradient.*Clip with run.clip_grad_norm": case.by_gradients
        and (recipe.closure or case.wrapper in {"clip-torch", "huggingface"} or float16),
        "the script wrote parameter .* after run.prepare": case.by_gradients and case.feature == "clamped",
        "was frozen at run.prepare and requires a gradient now": unfreezes and case.world_size > 1,
    }
    return [text for text, holds in found.items() if holds]


def inexact(case: Case) -> str:
    """Return why the weights are not those of plain torch; empty where they are."""
    feature, recipe = FEATURES[case.feature], RECIPES[case.optimizer]
    if case.strategy in {"compressed", "stale-sparse", "local-steps"}:
        return "gradients or updates are compressed"
    if feature.random:
        return "each rank draws its own random numbers"
    if case.by_engine and feature.forward_writes and case.event == "empty-slice":
        return "a replica without a batch makes no pass, and each pass writes the model's state"
    if case.strategy == "groups" and case.world_size > 1:
        return "replicas average at a pace of their own"
    if case.strategy == "groups/exact" and case.event in SLOW_EVENTS:
        return "a round has a batch of each replica, so other replicas make other rounds"
    if not (case.sums_updates or case.strategy == "groups/exact"):
        return ""
    if case.sums_updates and case.event == "lost":
        return "what the lost worker had not sent is lost, and survivors may be a step apart"
    if case.precision in {"bfloat16", "mixed"}:
        return "the shared parameters are float32, where plain torch rounds each update to bfloat16"
    if feature.writes and case.sums_updates:
        return "the script writes weights, or copies of them, that are ahead of the shared ones"
    if case.event == "one-nan" and case.sums_updates:
        return "an update that is not finite is left out"
    if case.by_gradients:
        return (
            "blocks without a gradient keep their moments for later" if recipe.moments and feature.idle_blocks else ""
        )
    if case.world_size == 1:
        return ""
    if recipe.moments and feature.unused:
        return "a rank without a gradient of a parameter keeps its momentum for later"
    if recipe.moments and case.event in {"plan-change", "join"} and case.sums_updates:
        return "a rank's momentum is of its own gradients, so a change of shares weighs all of it anew"
    if not recipe.linear:
        return "a mean of the ranks' updates is not the update by the mean gradient"
    if case.wrapper in {"clip", "clip-torch"}:
        return "each rank clips its own gradient"
    if case.precision == "float16-overflow":
        return "the rank without the spoiled sample makes its update"
    return ""


def _deviation(case: Case) -> float:
    """Return the rounding that the precision allows."""
    if case.optimizer == "muon-adamw":
        return 0.25 if case.precision in {"bfloat16", "mixed"} else 0.05  # torch's Muon computes in bfloat16
    return {"float32": 2e-3, "bfloat16": 0.25, "mixed": 0.25}.get(case.precision, 0.05)


Value = tuple[str, str]
Pair = tuple[Value, Value]


def pairs(axes: Mapping[str, Sequence[str]]) -> set[Pair]:
    """Return all pairs of values of two axes that are possible, each in the order of the axes."""
    named = {name: [(name, value) for value in values] for name, values in axes.items()}
    every = {pair for one, other in combinations(axes, 2) for pair in product(named[one], named[other])}
    return {pair for pair in every if not impossible(case_of(dict(pair)))}


def case_of(values: Mapping[str, str]) -> Case:
    """Return the simplest case that has these values."""
    return Case(**({"strategy": "volunteer"} if values.get("event") == "helped" else {}) | values)


def covering(needed: set[Pair], axes: Mapping[str, Sequence[str]] = AXES) -> Sequence[Case]:
    """Return possible cases in which every needed pair occurs; of a case that is refused, its refused pairs count.

    Greedy: each case begins with a pair that none had, and takes of every other axis a value with most such pairs, of
    those the one that was used least. The same for the same arguments."""
    left, found, uses = set(needed), [], Counter[Value]()
    for pair in sorted(needed):
        if pair not in left:
            continue
        values = dict(pair)
        for name in (one for one in axes if one not in values):
            values[name] = _best(values, name, axes[name], left, uses)
        case = Case(**values)
        found.append(case)
        uses.update(values.items())
        left -= {one for one in _pairs_of(values) if not _refused(values) or _refused(dict(one))}
    return found


def _best(values: Mapping[str, str], name: str, choices: Sequence[str], left: set[Pair], uses: Counter[Value]) -> str:
    fitting = [one for one in choices if not impossible(Case(**values, **{name: one}))]
    fitting = [one for one in fitting if _refused({**values, name: one}) == _refused(values)] or fitting
    return max(fitting, key=lambda one: (len(left & _pairs_of({**values, name: one})), -uses[name, one]))


def _pairs_of(values: Mapping[str, str]) -> set[Pair]:
    return set(combinations([(name, values[name]) for name in AXES if name in values], 2))


def _refused(values: Mapping[str, str]) -> bool:
    return isinstance(expected(case_of(values)), Refused)


def short() -> Sequence[Case]:
    """Return cases that cover every possible pair of values, but for those with slow values."""
    return covering(pairs(CHEAP), CHEAP)


def long_wrappers(wrappers: Container[str]) -> Sequence[Case]:
    """Return cases that cover every possible pair of one of these wrappers and another value."""
    return covering({pair for pair in pairs(AXES) if dict(pair).get("wrapper") in wrappers})


def long_events() -> Sequence[Case]:
    """Return cases that cover every possible pair of a slow event and another value, but for slow wrappers."""
    axes = {**CHEAP, "event": EVENTS}
    return covering({pair for pair in pairs(axes) if dict(pair).get("event") in SLOW_EVENTS}, axes)
