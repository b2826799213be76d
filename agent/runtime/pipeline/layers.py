"""The layers of a model that is cut into stages: what each one is, without the memory for it, and how it is made.

A layer is a module, one on the meta device, or a function that makes one. The latter two are made from the run's seed
and the layer's number alone, so a stage makes its own layers as one process would make them all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from atoll.agent.runtime.checkpoints.disk.header import Fingerprint, fingerprint
from atoll.agent.runtime.data.orders import mixed_seed
from atoll.errors import BadInput

MakesLayer = Callable[[], nn.Module]
RESETS: Final = ("reset_parameters", "_reset_parameters")  # torch's attention has the latter


class StageModule(nn.Module):
    """Consecutive layers of a model, under the names that they have in it."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name, layer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Raises BadInput for a layer whose output is no tensor: a stage hands one to the next."""
        for name, layer in self._modules.items():  # named_children leaves out a layer that stands here twice
            assert layer is not None
            inputs = checked(name, layer, layer(inputs))
        return inputs

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load this stage's part of the whole model's state."""
        own = self.state_dict().keys()
        return super().load_state_dict({name: state_dict[name] for name in own if name in state_dict}, *args, **options)


def checked(name: str, layer: nn.Module, output: Any) -> torch.Tensor:
    """The output of a layer. Raises BadInput where it is no tensor."""
    if not isinstance(output, torch.Tensor):
        raise BadInput(
            f"layer {name} ({type(layer).__name__}) gave a {type(output).__name__}, and a stage hands one tensor to "
            "the next. Wrap the layer so that it gives a tensor"
        )
    return output


@dataclass(frozen=True)
class Layers:
    """All of a model, by name. given: as the script gave them."""

    names: tuple[str, ...]
    given: tuple[nn.Module | MakesLayer, ...]

    @staticmethod
    def of(model: nn.Module | Sequence[nn.Module | MakesLayer]) -> Layers:
        """Raises BadInput for what has no layers in a row."""
        if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
            return Layers(tuple(model._modules), tuple(model))
        if isinstance(model, (list, tuple)) and model and all(callable(one) for one in model):
            return Layers(tuple(str(number) for number in range(len(model))), tuple(model))
        raise BadInput(
            f"a {type(model).__name__} cannot be cut into stages. Give run.prepare_pipeline an nn.Sequential without a "
            "forward of its own, or a list of layers (modules, or functions that make one)"
        )

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def described(self) -> tuple[nn.Module, ...]:
        """Each layer with shapes and dtypes; without memory, but for modules that were given with theirs."""
        found = []
        for name, one in zip(self.names, self.given, strict=True):
            if isinstance(one, nn.Module):
                found.append(one)
                continue
            with torch.device("meta"):
                made = one()
            if not isinstance(made, nn.Module):
                raise BadInput(f"what makes layer {name} gave a {type(made).__name__}, not a torch.nn.Module")
            found.append(made)
        return tuple(found)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the whole model."""
        together = [
            (f"{name}.{key}", tensor)
            for name, layer in zip(self.names, self.described, strict=True)
            for key, tensor in layer.state_dict().items()
        ]
        return fingerprint(dict(together))

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that require a gradient."""
        return tuple(
            f"{name}.{key}"
            for name, layer in zip(self.names, self.described, strict=True)
            for key, one in layer.named_parameters()
            if one.requires_grad
        )

    def parameter_bytes(self, layer: int) -> int:
        return sum(one.nbytes for one in self.described[layer].parameters())

    def refuse_tied(self, cuts: Sequence[int]) -> None:
        """Raises BadInput where layers of two stages share a parameter. cuts: the first layer of each stage."""
        owners: dict[int, tuple[str, int]] = {}  # by memory, in which two may lie; what has none is by identity
        for number, layer in enumerate(self.described):
            stage = sum(cut <= number for cut in cuts) - 1
            for key, one in layer.named_parameters():
                name = f"{self.names[number]}.{key}"
                other, there = owners.setdefault(one.data_ptr() or id(one), (name, stage))
                if there != stage:
                    raise BadInput(
                        f"{other} and {name} are one parameter, and lie in stages {there} and {stage}. Untie them, or "
                        "choose split_at such that one stage has both"
                    )

    def made(self, layer: int, seed: int) -> nn.Module:
        """The layer with its memory, on the CPU unless it was given elsewhere. Raises BadInput."""
        given, name = self.given[layer], self.names[layer]
        if isinstance(given, nn.Module) and not any(one.is_meta for one in _tensors(given)):
            return given
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed_seed(seed, layer))
            return _materialised(name, given) if isinstance(given, nn.Module) else given()

    def stage(self, begin: int, end: int, seed: int) -> StageModule:
        """Return the stage of layers [begin, end). A layer that occurs twice is one module, and so is a shared
        parameter."""
        made: list[nn.Module] = []
        layers: dict[int, nn.Module] = {}
        parameters: dict[int, nn.Parameter] = {}
        for number in range(begin, end):
            given = self.given[number]
            if not isinstance(given, nn.Module):
                made.append(self.made(number, seed))
                continue
            if id(given) not in layers:
                layers[id(given)] = self.made(number, seed)
                _share(given, layers[id(given)], parameters)
            made.append(layers[id(given)])
        return StageModule(list(zip(self.names[begin:end], made, strict=True)))


def _share(given: nn.Module, made: nn.Module, parameters: dict[int, nn.Parameter]) -> None:
    """Parameters that were given as one are one again, also over layers. parameters: by identity of the given one."""
    for key, one in given.named_parameters(remove_duplicate=False):
        holder, _, attribute = key.rpartition(".")
        module = made.get_submodule(holder)
        first = parameters.setdefault(id(one), getattr(module, attribute))
        if getattr(module, attribute) is not first:
            setattr(module, attribute, first)


def _materialised(name: str, layer: nn.Module) -> nn.Module:
    """A copy: what was given stays as it is, for it says which parameters are one."""
    for at, module in layer.named_modules():
        if any(one.is_meta for one in _own_tensors(module)) and not any(hasattr(module, reset) for reset in RESETS):
            where = f"{name}.{at}" if at else name
            raise BadInput(
                f"layer {where} ({type(module).__name__}) is on the meta device, has parameters or buffers of its own "
                "and no reset_parameters() that gives them values. Give it one, or give run.prepare_pipeline a "
                "function that makes the layer"
            )
    layer = copy.deepcopy(layer).to_empty(device="cpu")  # which gives each name memory of its own
    for module in reversed(list(layer.modules())):  # children first, as constructors have it
        for reset in RESETS:
            if hasattr(module, reset):
                getattr(module, reset)()
                break
    return layer


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
