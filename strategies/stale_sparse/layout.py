"""The parameters as the exchange engine sees them: flat memory with masters, moments and residuals beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from atoll.errors import BadInput
from atoll.kernels.compress import block_count
from atoll.kernels.pages import use_huge_pages
from atoll.strategies.stale_sparse.optimizer_rules import Rates, Rule

MAX_ENTRIES: Final = 2**31  # of one tensor: a residual or moment of more is beyond what one kernel call takes
LIVE_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True, eq=False)
class Layer:
    """One trained parameter. N entries; all tensors but `parameter` are float32 (last_step int32) on the CPU, [N]."""

    name: str
    parameter: nn.Parameter
    order: int  # in the model's own order, which is that of the forward pass or near it
    group: int
    rule: Rule
    master: torch.Tensor  # the parameter's true value
    residual: torch.Tensor | None  # what was not sent yet; None: it is in the live weights
    first: torch.Tensor | None  # momentum or first moment
    second: torch.Tensor | None
    last_step: torch.Tensor | None  # [blocks]: the update that touched a block last; None: moments are left as they are
    number: int = field(default=-1)  # in the exchange engine

    @property
    def blocks(self) -> int:
        return block_count(self.master.numel())

    @property
    def live(self) -> torch.Tensor:
        """The parameter's own memory as it is now, flat, [N]."""
        view = flat_view(self.parameter)
        assert view is not None  # or lay_out had refused it
        return view

    @property
    def on_cpu(self) -> bool:
        return self.parameter.device.type == "cpu"

    def k_blocks(self, sparsity: float, world_size: int) -> int:
        """Blocks that each rank sends: (1 - sparsity) of all, over the ranks (StellaTrain, section 6), 1 at least."""
        return max(1, round((1 - sparsity) * self.blocks / world_size)) if sparsity > 0 else self.blocks

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of `flat` with the parameter's shape and order in memory."""
        return flat.as_strided(self.parameter.shape, self.parameter.stride())


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """All entries in the order of memory, without a copy; None where there are gaps or overlaps between them."""
    strided = sorted(((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1))
    expected = 1
    for stride, size in strided:
        if stride != expected:
            return None
        expected *= size
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def lay_out_for_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, rates: Rates, *, lazy: bool
) -> list[Layer]:
    """Every parameter that is trained, with fresh masters, residuals and moments. lazy: with last_step.

    Raises BadInput for parameters that cannot be flattened."""
    groups = {id(one): index for index, group in enumerate(optimizer.param_groups) for one in group["params"]}
    layers: list[Layer] = []
    for name, parameter in _trained(model):
        group = groups[id(parameter)]
        moments = rates.moments(group)
        master = _master(name, parameter)
        layers.append(
            Layer(
                name=name,
                parameter=parameter,
                order=len(layers),
                group=group,
                rule=rates.rules[group],
                master=master,
                residual=_zeros(master.numel()),
                first=_zeros(master.numel()) if moments.first is not None else None,
                second=_zeros(master.numel()) if moments.second is not None else None,
                last_step=(
                    torch.zeros(block_count(master.numel()), dtype=torch.int32)
                    if lazy and moments.first is not None
                    else None
                ),
            )
        )
    return layers


def lay_out_for_updates(model: nn.Module) -> list[Layer]:
    """Every parameter that is trained, with a fresh master; all of one group, whose rule is to subtract.

    Raises BadInput for parameters that cannot be flattened."""
    return [
        Layer(
            name=name,
            parameter=parameter,
            order=order,
            group=0,
            rule="sgd",
            master=_master(name, parameter),
            residual=None,
            first=None,
            second=None,
            last_step=None,
        )
        for order, (name, parameter) in enumerate(_trained(model))
    ]


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() > 0:
            yield name, parameter


def _master(name: str, parameter: nn.Parameter) -> torch.Tensor:
    flat = flat_view(parameter)
    if flat is None or parameter.dtype not in LIVE_TYPES or parameter.numel() >= MAX_ENTRIES:
        raise BadInput(
            f"parameter {name} is {parameter.dtype}, {parameter.numel()} entries, strides {parameter.stride()}; "
            "strategy stale-sparse needs dense float32, float16 or bfloat16 memory of less than 2^31 entries"
        )
    return _zeros(flat.numel()).copy_(flat)


def _zeros(entries: int) -> torch.Tensor:
    """float32 [entries] on huge pages where the system has them: updates touch blocks all over, a page or more each."""
    zeros = torch.zeros(entries)
    use_huge_pages(zeros)
    return zeros


def adopt_optimizer_state(layers: Sequence[Layer], optimizer: torch.optim.Optimizer, rates: Rates) -> int:
    """Begin with the moments that the optimizer has (of a checkpoint), and let its state be the layers' own memory, so
    that optimizer.state_dict() tells it. Returns how many updates were made before."""
    made = 0
    for layer in layers:
        names = rates.moments(layer.group)
        state = optimizer.state[layer.parameter]
        for name, mine in ((names.first, layer.first), (names.second, layer.second)):
            if name is None or mine is None:
                continue
            saved = state.get(name)
            if isinstance(saved, torch.Tensor):
                layer.shaped(mine).copy_(saved)
            state[name] = layer.shaped(mine)
        if layer.rule in ("adam", "adamw"):
            made = max(made, int(state.get("step", 0)))
            state["step"] = torch.tensor(float(made))
    return made


def own_module_layers(model: nn.Module, layers: Sequence[Layer]) -> list[tuple[nn.Module, list[Layer]]]:
    """Each module with the layers it holds itself, where it holds any."""
    by_parameter: Mapping[int, Layer] = {id(layer.parameter): layer for layer in layers}
    found = []
    for module in model.modules():
        own = [id(one) for one in module._parameters.values() if one is not None]
        held = [by_parameter[one] for one in own if one in by_parameter]
        if held:
            found.append((module, held))
    return found
