"""The JSON form of the planners for checkpoints in CPU memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from dataclasses import fields as parts
from typing import Any, Final

from atoll.chunks import ChunksInput, plan_chunks
from atoll.controller.planners.failure_domains import LEVELS, Machine
from atoll.controller.planners.fields import MAX_NODES, fields, items, number, shown, whole
from atoll.controller.planners.placement import PlacementInput, plan_placement
from atoll.errors import BadInput

MAX_REPLICAS: Final = 1000
MAX_SPANS: Final = 100_000
MAX_BYTES: Final = 2**60
MAX_SECONDS: Final = 1e6
_MACHINE: Final = frozenset(part.name for part in parts(Machine))


def placement(data: dict[str, Any]) -> dict[str, Any]:
    optional = frozenset({"checkpoint_bytes", "site_safe", "previous"})
    fields(data, "", {"machines", "replicas"}, optional)
    replicas = whole(data["replicas"], "replicas", 1, MAX_REPLICAS)
    machines = _machines(data["machines"])
    size = data.get("checkpoint_bytes")
    if size is not None:
        size = whole(size, "checkpoint_bytes", 1, MAX_BYTES)
    elif any(machine.memory_bytes is not None for machine in machines):
        raise BadInput(
            "field checkpoint_bytes is missing. Needed with memory_bytes: what one machine's checkpoint takes"
        )
    site_safe = data.get("site_safe", False)
    if not isinstance(site_safe, bool):
        raise BadInput(f"site_safe = {shown(site_safe)} must be true or false")
    previous = _previous(data["previous"]) if data.get("previous") is not None else None
    plan = asdict(plan_placement(PlacementInput(machines, replicas, size, site_safe, previous)))
    return {name: value for name, value in plan.items() if value is not None}


def chunks(data: dict[str, Any]) -> dict[str, Any]:
    fields(data, "", {part.name for part in parts(ChunksInput)})
    spans = [
        number(span, f"idle_spans[{i}]", 0, MAX_SECONDS, " of seconds")
        for i, span in enumerate(items(data["idle_spans"], "idle_spans", MAX_SPANS))
    ]
    given = ChunksInput(
        idle_spans=tuple(spans),
        checkpoint_bytes=whole(data["checkpoint_bytes"], "checkpoint_bytes", 1, MAX_BYTES),
        replicas=whole(data["replicas"], "replicas", 1, MAX_REPLICAS),
        buffers=whole(data["buffers"], "buffers", 1, 4096),
        buffer_bytes=whole(data["buffer_bytes"], "buffer_bytes", 1, MAX_BYTES),
        bandwidth=number(data["bandwidth"], "bandwidth", 1, 1e15, " of bytes a second"),
        alpha=number(data["alpha"], "alpha", 0, MAX_SECONDS, " of seconds"),
        mu=number(data["mu"], "mu", 1e-6, 1),
    )
    return asdict(plan_chunks(given))


def _machines(value: Any) -> tuple[Machine, ...]:
    if type(value) is int:
        return (Machine(),) * whole(value, "machines", 1, MAX_NODES)
    machines = tuple(
        _machine(fields(machine, f"machines[{i}]", set(), _MACHINE), f"machines[{i}]")
        for i, machine in enumerate(items(value, "machines", MAX_NODES))
    )
    names = Counter(machine.name for machine in machines if machine.name is not None)
    if names and (twice := names.most_common(1)[0])[1] > 1:
        raise BadInput(f"machines name {twice[0]!r} twice. Give each machine once")
    _require_nested(machines)
    return machines


def _machine(machine: dict[str, Any], where: str) -> Machine:
    link, memory = machine.get("link_bps"), machine.get("memory_bytes")
    return Machine(
        **{key: _name(machine[key], f"{where}.{key}") for key in ("name", *LEVELS) if machine.get(key) is not None},
        link_bps=None if link is None else number(link, f"{where}.link_bps", 1, 1e15, " of bits a second"),
        memory_bytes=None if memory is None else whole(memory, f"{where}.memory_bytes", 0, MAX_BYTES),
    )


def _require_nested(machines: tuple[Machine, ...]) -> None:
    """A host is in one rack and one island, a rack in one island."""
    for inner, outer in (("host", "rack"), ("host", "island"), ("rack", "island")):
        found: dict[str, tuple[str | None, int]] = {}
        for i, machine in enumerate(machines):
            name, within = getattr(machine, inner), getattr(machine, outer)
            if name is None:
                continue
            other, first = found.setdefault(name, (within, i))
            if within != other:
                raise BadInput(
                    f"machines[{i}]: {inner} {name!r} has {outer} {within!r}, but {other!r} in machines[{first}]. "
                    f"A {inner} is in one {outer}: give each {inner} a name of its own"
                )


def _previous(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict) or len(value) > MAX_NODES:
        raise BadInput(f"previous = {shown(value)} must be an object: by machine's name, the names of its holders")
    return {
        _name(owner, "previous: a machine's name"): tuple(
            _name(name, f"previous[{shown(owner)}][{i}]")
            for i, name in enumerate(items(holders, f"previous[{shown(owner)}]", MAX_REPLICAS))
        )
        for owner, holders in value.items()
    }


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 256:
        raise BadInput(f"{where} = {shown(value)} must be a name of 1 to 256 characters")
    return value
