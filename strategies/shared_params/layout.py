"""Parameters as the exchange engine sees them: flat memory with shared parameters, moments and residuals beside it,
and writes of sparse blocks into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from atoll.agent.runtime.model.memory_order import flat_view
from atoll.agent.runtime.model.model_state import plain_parameters
from atoll.agent.runtime.strategy_interface.script_checks import Script
from atoll.errors import BadInput
from atoll.kernels.compress import BLOCK_ENTRIES, block_count
from atoll.kernels.exchange_engine import Rule
from atoll.kernels.pages import use_huge_pages
from atoll.strategies.declaration import StrategySettings

MAX_ENTRIES: Final = 2**31  # of one tensor: a residual or moment of more is beyond what one kernel call takes
LIVE_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True, eq=False)
class Layer:
    """One trained parameter. N entries; all tensors but `parameter` are float32 (last_step int32), [N], and on the CPU
    unless their names say otherwise."""

    name: str
    parameter: nn.Parameter
    order: int  # in the model's own order, which is that of the forward pass or near it
    shared_param: torch.Tensor  # the parameter's true value
    group: int = 0
    rule: Rule = "sgd"  # where updates are exchanged, shared parameters take their sum
    residual: torch.Tensor | None = None  # what was not sent yet; None: it is in the live weights
    first: torch.Tensor | None = None  # momentum or first moment
    second: torch.Tensor | None = None
    last_step: torch.Tensor | None = None  # [blocks]: the update that touched it last; None: moments stay as is
    device_residual: torch.Tensor | None = None  # on its device, where blocks are chosen there: added to `residual`
    number: int = -1  # of the exchange engine's tensor
    at: int = 0  # its first entry in the exchange engine's tensor, which holds others too where they are small
    aggregator_sum: torch.Tensor | None = None  # on the aggregator: the ranks' sums less the shared parameters
    aside: torch.Tensor | None = None  # the parameter's own memory, while it has the shared parameters' values

    @property
    def blocks(self) -> int:
        return block_count(self.shared_param.numel())

    @property
    def live(self) -> torch.Tensor:
        """Return the parameter's own memory as it is now, flat, [N]."""
        view = flat_view(self.parameter if self.aside is None else self.aside)
        assert view is not None  # or check_script had refused it
        return view

    @property
    def on_cpu(self) -> bool:
        return self.parameter.device.type == "cpu"

    def kept(self) -> torch.Tensor:
        """Return the whole residual, on the CPU."""
        assert self.residual is not None
        return self.residual if self.device_residual is None else self.residual + self.device_residual.cpu()

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of `flat` with the parameter's shape and order in memory."""
        return flat.as_strided(self.parameter.shape, self.parameter.stride())


def check_script(settings: StrategySettings, script: Script) -> None:
    """Raise BadInput for a parameter that cannot be flattened, or that the exchange's kernels do not take."""
    for name, parameter in trained(script.model):
        if flat_view(parameter) is None or parameter.dtype not in LIVE_TYPES or parameter.numel() >= MAX_ENTRIES:
            raise BadInput(
                f"parameter {name} is {parameter.dtype}, {parameter.numel()} entries, strides {parameter.stride()}; "
                "an exchange of sparse parts needs dense float32, float16 or bfloat16 memory of less than 2^31 entries"
            )


def lay_out_for_updates(model: nn.Module) -> list[Layer]:
    """Lay out every trained parameter of a checked model with a fresh shared parameter."""
    return [
        Layer(name=name, parameter=parameter, order=order, shared_param=shared_param_of(parameter))
        for order, (name, parameter) in enumerate(trained(model))
    ]


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters, by name, each once."""
    for name, parameter in plain_parameters(model):
        if parameter.requires_grad and parameter.numel() > 0:
            yield name, parameter


def shared_param_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a fresh shared parameter, flat, float32."""
    flat = flat_view(parameter)
    assert flat is not None  # or check_script had refused it
    return zeros(flat.numel()).copy_(flat)


def zeros(entries: int) -> torch.Tensor:
    """Return zeros, float32 [entries], on huge pages where the system has them.

    Updates touch blocks all over the memory, a page or more each."""
    zeros = torch.zeros(entries)
    use_huge_pages(zeros)
    return zeros


def write_blocks(live: torch.Tensor, index: NDArray[np.uint32], values: NDArray[np.float32]) -> None:
    """Write values [k, 16] into blocks of `live` (flat, [n], any device and floating type); else as `add_blocks`.

    The tensor's version does not change, on any device: only the script's writes count it up."""
    with _unsafe_preserve_version_counter(live):
        _change_blocks(live, index, values, add=False)


def add_blocks(live: torch.Tensor, index: NDArray[np.integer[Any]], values: NDArray[np.float32]) -> None:
    """Add values [k, 16] to blocks of `live` (flat, [n], any device and floating type).

    index: [k], ascending, each below ceil(n / 16). Values beyond the end of a shorter last block are ignored. Returns
    once the work is queued on torch's current stream."""
    _change_blocks(live, index, values, add=True)


@torch.no_grad()
def _change_blocks(
    live: torch.Tensor, index: NDArray[np.integer[Any]], values: NDArray[np.float32], *, add: bool
) -> None:
    """Change blocks. Sums are rounded once, where live has 16 bits."""
    whole = live.numel() // BLOCK_ENTRIES
    blocks, given = on_device(index.astype(np.int64), live.device), on_device(values, live.device)
    if len(index) and int(index[-1]) == whole:  # checked on the CPU: a check on the GPU would wait for its queue
        tail = live[whole * BLOCK_ENTRIES :]
        last = given[-1][: tail.numel()]
        tail.copy_(tail.float() + last if add else last)
        blocks, given = blocks[:-1], given[:-1]
    if blocks.numel():
        matrix = live[: whole * BLOCK_ENTRIES].view(whole, BLOCK_ENTRIES)
        rows = matrix.index_select(0, blocks).float() + given if add else given
        matrix.index_copy_(0, blocks, rows.to(live.dtype))


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a tensor of the same entries. On a GPU, work queued from now on sees it; the caller does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
