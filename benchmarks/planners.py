"""Planners at 1,000 nodes: OptPerf of 100 candidate totals, and each planner's whole decision through its JSON form.

    python benchmarks/planners.py [--nodes 1000] [--candidates 100] [--repeats 15]

One line each: median and range of the repeats. A decision is text in, text out: what the controller runs and records.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from atoll.controller.planners.batches.goodput import candidates_between
from atoll.controller.planners.batches.optperf import NodeModel, Overlap, optperf_of_totals
from atoll.controller.planners.registry import PLANNERS

OVERLAP = {"gamma": 0.2, "t_o": 0.05, "t_u": 0.01}


def show(what: str, goal: str, repeats: int, call: Callable[[], object]) -> None:
    call()
    times_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    print(f"{what:<58} {statistics.median(times_ms):7.2f} ms [{min(times_ms):.2f}-{max(times_ms):.2f}]  {goal}")


def decision(name: str, data: dict[str, Any]) -> Callable[[], object]:
    text = json.dumps(data)
    return lambda: PLANNERS[name].run_json(text)


def thin_links(rng: np.random.Generator, nodes: int) -> dict[str, Any]:
    """Devices like an RTX 2080 Ti, 3090 or 4090, in islands of ten."""
    kinds = [{"alpha": 20, "beta": 99}, {"alpha": 32, "beta": 148}, {"alpha": 28, "beta": 300}]
    devices = [kinds[int(rng.integers(3))] | {"max_batch": 256, "island": i // 10} for i in range(nodes)]
    rates, batches = [0.9, 0.97, 0.99, 0.995, 0.999], [0.5 * nodes, 8 * nodes, 64 * nodes, 256 * nodes]
    extra = [[0.01 / (1 - r) ** 0.5 * (1 + b / (100 * nodes)) for b in batches] for r in rates]
    return {
        "devices": devices,
        "bandwidths": [float(b) for b in rng.uniform(12.5e6, 125e6, -(-nodes // 10))],
        "entries": 86_000_000,
        "samples": 10_000_000,
        "surrogate": {"sparsities": rates, "batches": batches, "extra": extra},
    }


def racks(machines: int, gone: int = 0) -> list[dict[str, Any]]:
    """Two on a host, sixteen in a rack, 256 on an island; the first `gone` replaced by others."""
    return [
        {
            "name": f"new-{i}" if i < gone else f"m{i}",
            "host": f"h{i // 2}",
            "rack": f"r{i // 16}",
            "island": f"i{i // 256}",
            "link_bps": 10e9,
        }
        for i in range(machines)
    ]


def replaced(machines: int) -> dict[str, Any]:
    """Ten machines of the first placement gone, ten others in their place."""
    given = {"machines": racks(machines), "replicas": 2}
    before = json.loads(PLANNERS["placement"].run_json(json.dumps(given)))
    previous = {f"m{kept[0]}": [f"m{i}" for i in kept] for kept in before["holders"]}
    return {"machines": racks(machines, 10), "replicas": 2, "previous": previous}


def resnet101() -> list[int]:
    """The entries of all 314 tensors, in the order of the backward pass: convolutions, norms, the last layer."""
    sizes, channels = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(blocks):
            for entries, outputs in ((channels * width, width), (width * width * 9, width), (4 * width**2, 4 * width)):
                sizes += [entries, outputs, outputs]
            sizes += [4 * channels * width, 4 * width, 4 * width] if block == 0 else []
            channels = 4 * width
    return [*sizes, 2048 * 1000, 1000][::-1]


def backward_of(sizes: list[int], seconds: float) -> list[dict[str, float]]:
    """Half of the time by size, half the same for all."""
    return [{"bytes": 4 * n, "backward_s": seconds * (n / sum(sizes) + 1 / len(sizes)) / 2} for n in sizes]


def compressed(bandwidth: float) -> dict[str, Any]:
    """Nine options: none, and four rates on either processor; the link is twice as long where nothing is summed."""
    options: list[dict[str, Any]] = [
        {"name": "none", "tasks": [{"on": "link", "alpha": 1e-3, "beta": 1.5 / bandwidth}]}
    ]
    for on, slower in (("gpu", 1), ("cpu", 3)):
        for rate in (0.01, 0.03, 0.25, 0.5):
            pack = {"on": on, "alpha": 1e-4 * slower, "beta": 2e-10 * slower}
            send = {"on": "link", "alpha": 1e-3, "beta": 3 / bandwidth, "factor": rate}
            unpack = {"on": on, "alpha": 1e-4, "beta": 8e-10 * slower, "factor": rate}
            options.append({"name": f"{rate} on {on}", "tasks": [pack, send, unpack]})
    return {"forward_s": 0.05, "tensors": backward_of(resnet101(), 0.1), "options": options}


def fused(bandwidth: float) -> dict[str, Any]:
    compress = {"alpha": 1e-4, "beta": 2e-10, "floor_bytes": 4_000_000}
    communicate = {"alpha": 1e-3, "beta": 0.09 / bandwidth}
    return {
        "tensors": backward_of(resnet101(), 0.1),
        "forward_s": 0.05,
        "compress": compress,
        "communicate": communicate,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    print(f"{datetime.date.today()}  {platform.machine()}, {os.cpu_count()} cores, {given.nodes} nodes")

    rng = np.random.default_rng(1)
    rows = (rng.uniform(0.1, 1, (given.nodes, 4)) * [1e-3, 1e-2, 2e-3, 1e-2]).tolist()
    nodes = [dict(zip("qskm", row, strict=True)) | {"min_batch": 1, "max_batch": 512} for row in rows]
    models = [NodeModel.model_validate(node) for node in nodes]
    totals = candidates_between(2 * given.nodes, 400 * given.nodes, given.candidates)
    run = {"candidates": totals, "noise_scale": 30.0 * given.nodes, "initial_batch": 2 * given.nodes, "nodes": nodes}
    offers = [nodes[i] | {"name": f"node-{i}/0", "uncertainty": 0.02} for i in range(3)]
    sqnorms = {"batches": [8] * given.nodes, "local_sqnorms": [2.0] * given.nodes, "global_sqnorm": 1.0}

    show(
        f"OptPerf of {len(totals)} totals",
        "goal 10 ms",
        given.repeats,
        lambda: optperf_of_totals(models, Overlap(**OVERLAP), totals),
    )
    for name, data in [
        ("optperf", {"total_batch": 100 * given.nodes, "nodes": nodes} | OVERLAP),
        ("gns", sqnorms),
        ("goodput", run | OVERLAP),
        ("tta", thin_links(rng, given.nodes)),
    ]:
        show(f"decision: {name}, from text to text", "goal 100 ms", given.repeats, decision(name, data))
    three = run | OVERLAP | {"offers": offers, "uncertainty": 0.02}
    for what, data in [
        ("placement, two replicas", {"machines": given.nodes, "replicas": 2}),
        ("placement, three replicas, racks", {"machines": racks(given.nodes), "replicas": 3}),
        ("placement, ten replaced", replaced(given.nodes)),
    ]:
        show(f"decision: {what}, from text to text", "goal 100 ms", given.repeats, decision("placement", data))
    chunks = {"idle_spans": [0.01] * 100, "checkpoint_bytes": 30 * 10**9, "replicas": 2, "buffers": 4}
    chunks |= {"buffer_bytes": 128 << 20, "bandwidth": 1.25e9, "alpha": 1e-4, "mu": 0.9}
    show("decision: chunks, 30 GB in 100 spans, from text to text", "", given.repeats, decision("chunks", chunks))
    for mbit in (100, 1000, 10_000):
        for name, goal, data in [
            ("compression", "goal 100 ms", compressed(mbit * 125e3)),
            ("fusion", "goal 5 ms", fused(mbit * 125e3)),
            ("tensor-groups", "", compressed(mbit * 125e3)),
        ]:
            what = f"{name}, 314 tensors of ResNet-101, {mbit} Mbit/s, without JSON"
            asked = PLANNERS[name].read(json.dumps(data))
            show(what, goal, given.repeats, partial(PLANNERS[name].plan, asked))
    show("decision: admission of three devices, from text to text", "", given.repeats, decision("admission", three))


if __name__ == "__main__":
    main()
