"""Makes the state of all ranks equal, so that a run can continue by another strategy.

A rank leaves its strategy at a boundary at which all ranks do, and hands over what it has not sent. It is a replica
then, whatever the strategy before and after:

- Updates that were not sent are in the shared parameters in full, and the live weights
  are the shared parameters.
- Moments become the mean of the ranks' own, weighted with their shares of the batch. The first moment of the whole
  batch's gradient is exactly that mean: m is linear in the gradient, and g = sum_i share_i g_i. Second moments are
  already estimates of the whole batch's where ranks tell each other of them, and their mean is the one with the least
  error. Ranks whose moments have the same bits keep them.
- Gradients that were not sent are added up over the ranks, and count in the next update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import nn

from atoll.agent.runtime.checkpoints.disk.tensorfile import bytes_of
from atoll.agent.runtime.model.durable import UNSENT_MOMENTUM, Handover
from atoll.agent.runtime.model.memory_order import laid_out_as
from atoll.agent.runtime.model.model_state import plain_parameters
from atoll.agent.runtime.transport.process_groups import Group, gathered_rows


@torch.no_grad()
def average_moments(group: Group | None, optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Replace each rank's moments by the mean over ranks, weighted with `share`. Collective; raises PeerLost.

    Counts of steps stay: ranks make every update together. Moments that some rank lacks stay as well."""
    if group is None:
        return
    moments = list(_moments(optimizers))
    digest = xxhash.xxh3_64()
    for moment in moments:
        digest.update(bytes_of(moment.detach().cpu().contiguous()))
    rows = gathered_rows(group, [len(moments), digest.intdigest() >> 1])
    if all(row == rows[0] for row in rows) or len({count for count, _ in rows}) > 1:
        return
    for moment in moments:
        part = moment.detach().to("cpu", torch.float32).contiguous() * share
        group.sum_in_place(part, "averaging moments")
        moment.copy_(part)


def _moments(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the optimizers' floating-point state that has its parameter's shape, in the parameters' order."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for name in sorted(state):
                    value = state[name]
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                        yield value


class UnsentGradients:
    """Gradients of the whole batch that the strategy before left unsent. Each counts in its parameter's next update."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(plain_parameters(model))
        self._waiting: dict[int, torch.Tensor] = {}  # by id(parameter); float32 [N] on the CPU
        self._added: set[int] = set()  # to gradients of the update under way

    def put(self, handed_over: Handover) -> None:
        """Take over what all ranks handed over together."""
        for name, unsent_N in handed_over.unsent.items():
            parameter = self._named.get(name)
            if parameter is not None and not name.startswith(UNSENT_MOMENTUM) and bool(unsent_N.any()):
                before = self._waiting.get(id(parameter))
                self._waiting[id(parameter)] = unsent_N if before is None else before + unsent_N

    @torch.no_grad()
    def add_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Add what waits to the gradients of an update that begins."""
        self._added.clear()
        if not self._waiting:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides gradients by it
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            unsent_N, gradient = self._waiting.get(id(parameter)), parameter.grad
            if unsent_N is not None and gradient is not None and not gradient.is_sparse:
                laid_out = laid_out_as(unsent_N.to(gradient.device), parameter)
                gradient.add_(laid_out, alpha=1.0 if scale is None else float(scale))
                self._added.add(id(parameter))

    def applied(self) -> None:
        """Forget what was in the gradients of the update that is over."""
        for key in self._added:
            del self._waiting[key]
        self._added.clear()


def handed_momentum(handed_over: Handover) -> bool:
    """Return True if momentum of unsent gradients ends with the strategy."""
    return any(name.startswith(UNSENT_MOMENTUM) and bool(one.any()) for name, one in handed_over.unsent.items())
