"""The methods that race, by name, each with the settings that are tried for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from atoll.controller.planners.islands.exchange_density import ExchangeDensityInput, plan_exchange_density
from atoll.controller.planners.islands.wire_bytes import VALUE_BYTES
from atoll.strategies.compressed.codes.algorithm import Algorithm
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.local_steps.controller import ENOUGH, USED
from atoll.strategies.local_steps.settings import RETURNED, LocalSteps
from atoll.strategies.stale_sparse.settings import StaleSparse
from racing.clock import link_of
from racing.inner import Method, Replica, Setting
from racing.local import DiLoCo, SparseLoCo
from racing.synchronous import Alone, CompressedGradients, Ddp, OneShot, PowerSgd
from racing.updates import OwnedUpdates, Updates

RATES: Final = (2e-3, 4e-3, 1e-3)
INNER: Final = tuple(Setting(learning_rate=rate) for rate in (2e-3, 1e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3))
OUTER: Final = tuple(
    Setting(learning_rate=rate, outer_learning_rate=outer, momentum=0.9)
    for rate in (2e-3, 4e-3)
    for outer in (0.7, 0.4, 1.0)
)
BITS: Final = {"float32": 32, "float16": 16, "int4": 4, "int2": 2}
SPARSE: Final = tuple(Setting(learning_rate=rate, outer_learning_rate=outer) for rate in RATES for outer in (1.0, 0.7))


@dataclass(frozen=True, slots=True)
class Runner:
    """build: from the islands' replicas. settings: the six that are tried. whole: one island with all the data."""

    build: Callable[[Sequence[Replica], Setting], Method]
    settings: tuple[Setting, ...] = INNER
    whole: bool = False
    exchanges: bool = True


def _diloco(every: int, **fixed: float) -> Runner:
    def build(replicas: Sequence[Replica], setting: Setting) -> Method:
        return DiLoCo(
            replicas,
            every=every,
            outer_learning_rate=setting.outer_learning_rate,
            momentum=setting.momentum,
            bits=int(fixed.get("bits", 32)),
            fragments=int(fixed.get("fragments", 1)),
            late=int(fixed.get("late", 0)),
            alpha=float(fixed.get("alpha", 0.0)),
        )

    return Runner(build, OUTER)


def _averaging(every: int) -> Runner:
    return Runner(lambda replicas, _: DiLoCo(replicas, every=every, outer_learning_rate=1.0, momentum=0.0))


def _sparse_loco(every: int, density: float) -> Runner:
    return Runner(
        lambda replicas, one: SparseLoCo(
            replicas, every=every, density=density, outer_learning_rate=one.outer_learning_rate
        ),
        SPARSE,
    )


def _updates(density: float, bits: int, every: int = 1, late: int = 1) -> Runner:
    return Runner(lambda replicas, _: Updates(replicas, density=density, bits=bits, every=every, late=late))


def _owned(density: float, back: float, bits: int, every: int = 1, late: int = 1, **other: bool) -> Runner:
    return Runner(
        lambda replicas, _: OwnedUpdates(
            replicas, density=density, back=back, bits=bits, every=every, late=late, **other
        )
    )


def _stale_sparse(settings: StaleSparse, *, whole_batch: bool = True) -> Runner:
    """The strategy's exchange: the islands share what it sends."""

    def build(replicas: Sequence[Replica], _: Setting) -> Method:
        density, late = (1 - settings.sparsity) / len(replicas), settings.staleness
        return Updates(replicas, density=density, bits=BITS[settings.values], late=late, whole_batch=whole_batch)

    return Runner(build)


def _local_steps(settings: LocalSteps) -> Runner:
    """With the controller's choice of whose weights gradients are taken at, where settings do not say that."""
    density, bits = settings.density, BITS[settings.values]
    return _owned(
        density,
        min(1.0, RETURNED * density),
        bits,
        settings.every,
        settings.staleness,
        at_shared_params=settings.gradients == "shared_params",
        follows="gradients" not in settings.model_fields_set,
    )


def _by_link(rho: float) -> Runner:
    """local-steps with the density that the controller gives it once it knows links on which a dense ring takes rho
    steps."""
    settings = LocalSteps()

    def build(replicas: Sequence[Replica], setting: Setting) -> Method:
        islands, entries = len(replicas), replicas[0].theta.numel()
        network = link_of(rho, entries, islands, step_s=1.0)
        asked = ExchangeDensityInput(
            entries=entries,
            bandwidths=(network.up_bps / 8,) * islands,
            step_s=1.0,
            value_bytes=VALUE_BYTES[settings.values],
            enough=ENOUGH,
            returned=RETURNED,
            used=USED,
        )
        planned = settings.model_copy(update={"density": plan_exchange_density(asked).density})
        return _local_steps(planned).build(replicas, setting)

    return Runner(build)


def _compressed(algorithm: Algorithm) -> Runner:
    return Runner(lambda replicas, _: CompressedGradients(replicas, Compressed(algorithm=algorithm)))


FIELD: Final[Mapping[str, Runner]] = {
    "alone": Runner(lambda replicas, _: Alone(replicas), exchanges=False),
    "alone-averaged": Runner(lambda replicas, _: OneShot(replicas), exchanges=False),
    "solo-all": Runner(lambda replicas, _: Alone(replicas), whole=True, exchanges=False),
    "ddp": Runner(lambda replicas, _: Ddp(replicas)),
    "ddp-bf16": Runner(lambda replicas, _: Ddp(replicas, bits=16)),
    **{f"compressed-{algorithm}": _compressed(algorithm) for algorithm in get_args(Algorithm)},
    "powersgd-2": Runner(lambda replicas, _: PowerSgd(replicas, rank=2)),
    "averaging-10": _averaging(10),
    "averaging-25": _averaging(25),
    "averaging-100": _averaging(100),
    "diloco-10": _diloco(10),
    "diloco-25": _diloco(25),
    "diloco-100": _diloco(100),
    **{f"diloco-{every}-4bit": _diloco(every, bits=4) for every in (10, 25, 100)},
    **{f"streaming-{every}-4bit": _diloco(every, bits=4, fragments=4, late=2, alpha=0.5) for every in (24, 96)},
    "sparseloco-10": _sparse_loco(10, 1 / 32),
    "sparseloco-30": _sparse_loco(30, 1 / 64),
    "stale-sparse": _stale_sparse(StaleSparse()),
    "stale-sparse-own-moments": _stale_sparse(StaleSparse(), whole_batch=False),  # as it was until 0.1
    "stale-sparse-1%-16bit": _stale_sparse(StaleSparse(sparsity=0.99, values="float16"), whole_batch=False),
    "local-steps": _local_steps(LocalSteps()),
    "local-steps-own-gradients": _local_steps(LocalSteps(gradients="own")),
    "local-steps-shared_params": _local_steps(LocalSteps(gradients="shared_params")),
    "local-steps-own-moments": _owned(0.20, 0.40, 2, whole_batch=False),  # its default until 0.1
    "local-steps-100%-4bit": _local_steps(LocalSteps(density=1.0, values="int4")),
    **{f"local-steps@{rho}": _by_link(rho) for rho in (40, 130, 400)},  # each for that link alone
    **{f"local-steps-late-{late}": _local_steps(LocalSteps(staleness=late)) for late in (2, 4, 6, 8, 12)},
    **{
        f"local-steps-turns-{every}": _local_steps(LocalSteps(density=min(1.0, 0.2 * every), every=every))
        for every in (2, 4, 8)
    },
    # What their engine could do with other values, each island sending so much.
    "updates-1%-16bit": _updates(0.01, 16),
    "updates-10%-16bit": _updates(0.10, 16),
    "updates-3.6%-4bit": _updates(0.036, 4),
    "updates-30%-4bit": _updates(0.30, 4),
    "updates-40%-2bit": _updates(0.40, 2),
    "updates-10%-2bit-2": _updates(0.10, 2, every=2, late=2),
    "updates-36%-2bit-10": _updates(0.36, 2, every=10, late=2),
    "updates-36%-2bit-30": _updates(0.36, 2, every=30, late=5),
    "updates-all": _updates(1.0, 32, late=0),
    # The same through aggregators: what an island receives does not grow with their number.
    "owned-100%-4bit": _owned(1.0, 1.0, 4),
    "owned-20%-40%-2bit": _owned(0.20, 0.40, 2),
    "owned-20%-40%-2bit-10": _owned(0.20, 0.40, 2, every=10, late=2),
    "owned-2%-4%-2bit": _owned(0.02, 0.04, 2),
}
