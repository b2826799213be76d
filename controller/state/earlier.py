"""Records of earlier versions in the form of today, for the codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from atoll.controller.state.records import JobLearned, JobPins, JobRecord, JobStatus, PlacementRecord, PlanRecord

Data = dict[str, Any]


def as_now(kind: type, data: Data) -> Data:
    """`data` of a record of this kind, with the fields of today. What already has them is left as it is."""
    change = _CHANGES.get(kind)
    return change(data) if change is not None else data


def _placement(data: Data) -> Data:
    """Until 0.1 a placement was plan number 0 of its run."""
    if data.get("id") != 0:
        return data
    return {name: data[name] for name in ("run", "reason", "input", "output") if name in data}


def _job(data: Data) -> Data:
    """Until 0.1 stale-sparse's `rate` was the one parameter of any strategy, null where there was none."""
    data = _with_params(data, "pinned_params")
    if isinstance(adapted := data.get("adapted"), dict):
        data["adapted"] = _with_params(adapted, "strategy_params")
    if isinstance(spec := data.get("spec"), dict):
        data["spec"] = _spec(spec)
    return data if "status" in data else _in_parts(data)


def _in_parts(data: Data) -> Data:
    """Until 0.1 all fields of a job's parts were its own, those of what is pinned with a prefix."""
    parts: Data = {
        "status": {field.name: field.name for field in fields(JobStatus)},
        "learned": {field.name: field.name for field in fields(JobLearned)},
        "pinned": {f"pinned_{field.name}": field.name for field in fields(JobPins)},
    }
    parts["pinned"] |= {"pinned_params": "strategy_params", "pinned_batch": "total_batch"}
    own = {name: value for name, value in data.items() if not any(name in names for names in parts.values())}
    return own | {
        part: {names[name]: value for name, value in data.items() if name in names} for part, names in parts.items()
    }


def _plan(data: Data) -> Data:
    return _with_params(data, "strategy_params")


def _with_params(data: Data, field: str) -> Data:
    if "rate" not in data:
        return data
    rest = {name: value for name, value in data.items() if name != "rate"}
    return rest | {field: {} if data["rate"] is None else {"sparsity": data["rate"]}}


def _spec(data: Data) -> Data:
    """Until 0.1 the settings of stale-sparse had a field each, null with strategy dense."""
    rest = {name: value for name, value in data.items() if name != "stale_sparse"}
    if isinstance(settings := data.get("stale_sparse"), dict):
        named = {("sparsity" if name == "rate" else name): value for name, value in settings.items()}
        if "no_error_feedback" in named:
            named["error_feedback"] = not named.pop("no_error_feedback")
        rest |= {"strategy": "stale-sparse", "strategy_settings": named}
    if isinstance(adapt := rest.get("adapt"), dict) and "rate" in adapt:
        others = {name: value for name, value in adapt.items() if name != "rate"}
        rest["adapt"] = others | {"strategy_params": ["sparsity"] if adapt["rate"] else []}
    return rest


_CHANGES: Final[Mapping[type, Callable[[Data], Data]]] = {
    PlacementRecord: _placement,
    JobRecord: _job,
    PlanRecord: _plan,
}
