"""The JSON form of each planner: a checked object to its data classes, its plan to an object."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any, Final, cast

from atoll.controller.planners.admission import AdmissionInput, Offer, Split, plan_admission
from atoll.controller.planners.even import EvenInput, split_evenly
from atoll.controller.planners.fields import (
    BOUNDS,
    MAX_BATCH,
    MAX_NODES,
    bounds,
    choice,
    fields,
    items,
    nodes,
    number,
    seconds,
    shown,
    whole,
)
from atoll.controller.planners.gns import GnsInput, Weights, estimate_gns
from atoll.controller.planners.goodput import GoodputInput, Rule, plan_goodput
from atoll.controller.planners.inverse_time import InverseTimeInput, split_by_inverse_time
from atoll.controller.planners.optperf import NodeModel, OptPerfInput, Overlap, plan_optperf
from atoll.controller.planners.surrogate import Surrogate
from atoll.controller.planners.tta import Device, RateCost, TtaInput, plan_tta
from atoll.errors import BadInput

MAX_CANDIDATES: Final = 1000
MAX_OFFERS: Final = 64
"""Each costs a plan of the whole run; who waits longer is judged in the next decision."""
MAX_GRID: Final = 256
"""Rates, and total batches, of a surrogate."""
MAX_SECONDS: Final = 1e6
_MODEL: Final = {"q", "s", "k", "m"}
_OVERLAP: Final = {"gamma", "t_o", "t_u"}
_RUN: Final = {"candidates", "nodes", "noise_scale", "initial_batch"} | _OVERLAP


def even(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", {"total_batch", "nodes"})
    total = whole(data["total_batch"], "total_batch", 1)
    given: Any = data["nodes"]
    if type(given) is int:
        given = [{}] * min(whole(given, "nodes", 1), MAX_NODES + 1)
    limits = []
    for i, node in enumerate(nodes(given)):
        where = f"nodes[{i}]"
        limits.append(bounds(fields(node, where, set(), BOUNDS), where))
    return asdict(split_evenly(EvenInput(total, tuple(limits))))


def inverse_time(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", {"total_batch", "nodes"})
    total = whole(data["total_batch"], "total_batch", 1)
    times, limits = [], []
    for i, given in enumerate(nodes(data["nodes"])):
        where = f"nodes[{i}]"
        node = fields(given, where, {"seconds_per_sample"}, BOUNDS)
        times.append(seconds(node["seconds_per_sample"], f"{where}.seconds_per_sample"))
        limits.append(bounds(node, where))
    return asdict(split_by_inverse_time(InverseTimeInput(total, tuple(times), tuple(limits))))


def optperf(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", {"total_batch", "nodes"} | _OVERLAP)
    total = whole(data["total_batch"], "total_batch", 1)
    return asdict(plan_optperf(OptPerfInput(total, _models(data["nodes"]), _overlap(data, ""))))


def gns(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", {"batches", "local_sqnorms", "global_sqnorm"}, frozenset({"weights"}))
    batches = [whole(b, f"batches[{i}]", 0) for i, b in enumerate(items(data["batches"], "batches", MAX_NODES))]
    # The printed weights solve a linear system of this many unknowns.
    weights = choice(data.get("weights", "pooled"), "weights", ("pooled", "printed"))
    if weights == "printed" and len(batches) > 2000:
        raise BadInput(f'weights = "printed" with {len(batches)} nodes takes too long: at most 2000. Use "pooled"')
    local = [
        _sqnorm(x, f"local_sqnorms[{i}]")
        for i, x in enumerate(items(data["local_sqnorms"], "local_sqnorms", MAX_NODES))
    ]
    whole_norm = _sqnorm(data["global_sqnorm"], "global_sqnorm")
    return asdict(estimate_gns(GnsInput(tuple(batches), tuple(local), whole_norm, cast(Weights, weights))))


def goodput(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", _RUN, frozenset({"rule"}))
    return asdict(plan_goodput(_run(data)))


def admission(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", _RUN | {"offers", "uncertainty"}, frozenset({"rule", "cost", "split"}))
    run = _run(data)
    offers = tuple(
        _offer(offer, f"offers[{i}]", run.overlap)
        for i, offer in enumerate(items(data["offers"], "offers", MAX_OFFERS))
    )
    names = [offer.name for offer in offers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"offers name {twice!r} twice. Give each device once")
    uncertainty = number(data["uncertainty"], "uncertainty", 0, 10)
    cost = number(data.get("cost", 0.0), "cost", 0, 1)
    split = cast(Split, choice(data.get("split", "best"), "split", ("best", "even")))
    return asdict(plan_admission(AdmissionInput(run, offers, uncertainty, cost, split)))


def tta(data: dict[str, Any]) -> dict[str, Any]:
    return asdict(plan_tta(tta_input(data)))


def tta_input(data: dict[str, Any]) -> TtaInput:
    required = {"devices", "bandwidths", "entries", "surrogate", "samples"}
    fields(data, "", required, frozenset({"value_bytes", "balance", "totals", "rate_cost"}))
    bandwidths = [
        number(b, f"bandwidths[{i}]", 1, 1e15, " of bytes a second")
        for i, b in enumerate(items(data["bandwidths"], "bandwidths", MAX_NODES))
    ]
    devices = [
        _device(device, f"devices[{i}]", len(bandwidths))
        for i, device in enumerate(items(data["devices"], "devices", MAX_NODES))
    ]
    return TtaInput(
        devices=tuple(devices),
        bandwidths=tuple(bandwidths),
        entries=whole(data["entries"], "entries", 1),
        surrogate=surrogate(data["surrogate"]),
        samples=whole(data["samples"], "samples", 1),
        value_bytes=whole(data.get("value_bytes", 2), "value_bytes", 1, 8),
        balance=number(data.get("balance", 0.1), "balance", 0, 1e3),
        totals=_totals(data["totals"]) if "totals" in data else None,
        rate_cost=_rate_cost(data["rate_cost"]) if "rate_cost" in data else RateCost(0.0, 0.0),
    )


def _rate_cost(value: Any) -> RateCost:
    cost = fields(value, "rate_cost", {"seconds", "rate"})
    seconds_kept = number(cost["seconds"], "rate_cost.seconds", 0, MAX_SECONDS)
    return RateCost(seconds_kept, number(cost["rate"], "rate_cost.rate", 0, 1 - 1e-9))


def _totals(value: Any) -> tuple[int, int]:
    low, high = (whole(x, f"totals[{i}]", 1, MAX_BATCH) for i, x in enumerate(items(value, "totals", 2, 2)))
    if low > high:
        raise BadInput(f"totals = [{low}, {high}] must be the least and the largest total batch, in this order")
    return low, high


def _models(value: Any) -> tuple[NodeModel, ...]:
    return tuple(
        _model(fields(node, f"nodes[{i}]", _MODEL, BOUNDS), f"nodes[{i}]") for i, node in enumerate(nodes(value))
    )


def _model(node: dict[str, Any], where: str) -> NodeModel:
    q, s, k, m = (number(node[name], f"{where}.{name}", 0, MAX_SECONDS, " of seconds") for name in "qskm")
    if q + k < 1e-9:
        raise BadInput(
            f"{where}: q + k = {q + k:g} must be at least 1e-9 seconds a sample. Measure two distinct batches"
        )
    return NodeModel(q, s, k, m, bounds(node, where))


def _overlap(data: dict[str, Any], prefix: str) -> Overlap:
    t_o, t_u = (number(data[name], f"{prefix}{name}", 0, MAX_SECONDS, " of seconds") for name in ("t_o", "t_u"))
    return Overlap(number(data["gamma"], f"{prefix}gamma", 0, 1), t_o, t_u)


def _run(data: dict[str, Any]) -> GoodputInput:
    given = items(data["candidates"], "candidates", MAX_CANDIDATES)
    rule = choice(data.get("rule", "adascale"), "rule", ("adascale", "square-root"))
    return GoodputInput(
        candidates=tuple(whole(c, f"candidates[{i}]", 1) for i, c in enumerate(given)),
        nodes=_models(data["nodes"]),
        overlap=_overlap(data, ""),
        noise_scale=number(data["noise_scale"], "noise_scale", 0, 1e15, " of samples"),
        initial_batch=whole(data["initial_batch"], "initial_batch", 1),
        rule=cast(Rule, rule),
    )


def _offer(value: Any, where: str, run: Overlap) -> Offer:
    offer = fields(value, where, {"name", "uncertainty"} | _MODEL, BOUNDS | {"t_o", "t_u"})
    name = offer["name"]
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise BadInput(f"{where}.name = {shown(name)} must be a name of 1 to 256 characters")
    overlap = _overlap({"gamma": run.gamma, "t_o": run.t_o, "t_u": run.t_u} | offer, f"{where}.")
    uncertainty = number(offer["uncertainty"], f"{where}.uncertainty", 0, 10)
    return Offer(name, _model(offer, where), overlap, uncertainty)


def _device(value: Any, where: str, islands: int) -> Device:
    """Either (alpha, beta), or a step's fixed and per-sample times."""
    measured = isinstance(value, dict) and "q" in value
    device = fields(value, where, _MODEL if measured else {"alpha", "beta"}, BOUNDS | {"island"})
    island = whole(device.get("island", 0), f"{where}.island", 0, islands - 1)
    if measured:
        node = _model(device, where)
        return Device(node.q + node.k, node.s + node.m, 0.0, island, node.bounds)
    return Device.saturating(
        number(device["alpha"], f"{where}.alpha", 0, MAX_BATCH, " of samples"),
        number(device["beta"], f"{where}.beta", 1e-6, 1e9, " of samples a second"),
        island,
        bounds(device, where),
    )


def surrogate(value: Any) -> Surrogate:
    data = fields(value, "surrogate", {"rates", "batches", "extra"})
    rates = _ascending(data["rates"], "surrogate.rates", 0, 1 - 1e-9)
    batches = _ascending(data["batches"], "surrogate.batches", 1, MAX_BATCH)
    extra = [
        tuple(
            number(x, f"surrogate.extra[{i}][{j}]", -0.999, 1e6)
            for j, x in enumerate(items(row, f"surrogate.extra[{i}]", len(batches), len(batches)))
        )
        for i, row in enumerate(items(data["extra"], "surrogate.extra", len(rates), len(rates)))
    ]
    return Surrogate(rates, batches, tuple(extra))


def _ascending(value: Any, where: str, low: float, high: float) -> tuple[float, ...]:
    found = tuple(number(x, f"{where}[{i}]", low, high) for i, x in enumerate(items(value, where, MAX_GRID)))
    if any(after <= before for before, after in itertools.pairwise(found)):
        raise BadInput(f"{where} must ascend, each value once. Sort them")
    return found


def _sqnorm(value: Any, where: str) -> float:
    return number(value, where, 0, 1e200)  # beyond gradients, and no product overflows
