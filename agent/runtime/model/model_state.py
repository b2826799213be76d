"""A model's state dict by names that do not depend on torch.compile, and its way back, whatever grew meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import COMPILED, plain_name


def plain_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield like model.named_parameters(), with plain names."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


@dataclass(slots=True)
class ModelTensors:
    """A model's tensors by plain name. Shared ones have several names."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of the state dict
    unsaved: dict[str, torch.Tensor] = field(default_factory=dict)  # buffers that are not
    empty: set[str] = field(default_factory=set)  # buffers that are None
    owners: dict[str, nn.Module] = field(default_factory=dict)  # by path

    def identity(self) -> list[int]:
        """Return the ids of modules, parameters and buffers: an equal list as long as `of` would find the same.

        This object refers to those found, so no other object takes their ids."""
        modules = self.owners.values()
        return [id(one) for module in modules for one in module._buffers.values()] + [
            id(one) for module in modules for held in (module._parameters, module._modules) for one in held.values()
        ]

    @staticmethod
    def of(model: nn.Module) -> ModelTensors:
        found = ModelTensors()
        stack = [("", model)]
        while stack:
            prefix, module = stack.pop()
            found.owners[prefix[:-1]] = module
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.parameters[prefix + name] = parameter
            for name, buffer in module._buffers.items():
                if buffer is None:
                    found.empty.add(prefix + name)
                else:
                    unsaved = name in module._non_persistent_buffers_set
                    (found.unsaved if unsaved else found.buffers)[prefix + name] = buffer
            for name, child in module._modules.items():
                if child is not None:
                    stack.append((prefix if name + "." == COMPILED else f"{prefix}{name}.", child))
        return found


def module_state(module: nn.Module) -> dict[str, Any]:
    """module.state_dict() by plain names. Tensors are live."""
    return plain_state(module.state_dict())


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state dict by plain names, with the versions of its layout that load_state_dict reads."""
    if not any(COMPILED in name for name in state):
        return state
    plain: OrderedDict[str, Any] = OrderedDict((plain_name(name), value) for name, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        plain._metadata = OrderedDict(  # type: ignore[attr-defined]
            (_plain_path(name), value) for name, value in metadata.items()
        )
    return plain


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """module.load_state_dict(state), by plain names. A buffer takes the shape and dtype that it has in `state`, or is
    made or removed. Raises RuntimeError where parameters differ."""
    saved = OrderedDict((plain_name(name), value) for name, value in state.items())
    has = ModelTensors.of(module)
    owners = has.owners
    for name, buffer in has.buffers.items():
        if name not in saved:
            _set_buffer(owners, name, None)
        elif isinstance(value := saved[name], torch.Tensor) and not alike(buffer, value, device=False):
            _set_buffer(owners, name, value.to(buffer.device, copy=True))
    known = module_state(module).keys()
    for name, value in saved.items():
        if name not in known and name not in has.parameters and isinstance(value, torch.Tensor):
            _set_buffer(owners, name, value.to(_device_of(module), copy=True))
    names = {plain_name(name): name for name in module.state_dict()}
    by_live_name = OrderedDict((names.get(name, name), value) for name, value in saved.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        plain = {_plain_path(name): value for name, value in metadata.items()}
        by_live_name._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, plain[key])
            for name, _ in module.named_modules(remove_duplicate=False)
            if (key := _plain_path(name)) in plain
        )
    module.load_state_dict(by_live_name)


def put_into(place: dict[str, Any], key: str, kept: Any) -> None:
    """Put a value at `key`: into the memory of the present one where that fits, because captured graphs know it."""
    live = place.get(key)
    if isinstance(live, torch.Tensor) and isinstance(kept, torch.Tensor) and alike(live, kept):
        live.copy_(kept)
    else:
        place[key] = kept.clone() if isinstance(kept, torch.Tensor) else kept


def alike(one: torch.Tensor, other: torch.Tensor, *, device: bool = True) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and (not device or one.device == other.device)


def _set_buffer(owners: Mapping[str, nn.Module], name: str, value: torch.Tensor | None) -> None:
    """Set a buffer. If the model lacks its module or has another object of that name, load_state_dict reports it."""
    path, _, key = name.rpartition(".")
    owner = owners.get(path)
    if owner is not None and (key in owner._buffers or not hasattr(owner, key)):
        owner.register_buffer(key, value)


def _device_of(module: nn.Module) -> torch.device:
    tensor = next(module.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def _plain_path(module: str) -> str:
    """The plain name of a module."""
    return plain_name(f"{module}.")[:-1]
