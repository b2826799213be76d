"""An island of several workers as one replica: each of its steps is exact, and its leader exchanges for all of it.

Inside, gradients are combined over torch.distributed as under strategy `dense`, so all workers make the same update.
Others' updates come into the leader's live weights at a boundary, and from there, as whole weights, into its mates'.
They are equal bit for bit, whatever rounding does elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from atoll.agent.runtime.model.as_one import OptimizerState
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.reduction import ReducedGradients
from atoll.agent.runtime.strategy_interface.capabilities import Pass, StepEvents
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput
from atoll.strategies.dense.worker import DenseReducer
from atoll.strategies.shared_params.exchange import LayerExchange
from atoll.strategies.shared_params.forward_weights import ForwardWeights
from atoll.strategies.shared_params.live_weights import LiveWeights


class Replica:
    """This rank's island, of several workers. Methods run on the training thread.

    Methods marked collective are so in the island, and raise PeerLost."""

    def __init__(self, group: Group, ranks: Sequence[int], model: nn.Module, events: StepEvents) -> None:
        """ranks: of the run, in this island, ascending; the first leads."""
        self._group, self._ranks = group, ranks
        self.gradients = ReducedGradients(model, DenseReducer(group), events, _nothing, group.gather_rows)

    @classmethod
    def of(
        cls, session: Session, islands: Sequence[Sequence[int]], model: nn.Module, events: StepEvents
    ) -> Replica | None:
        """Return this rank's replica; None where it is alone in its island. Collective in the run; raises PeerLost."""
        if session.group is None or all(len(ranks) == 1 for ranks in islands):
            return None
        group = session.group.parted(islands, session.collective_timeout_s)
        ranks = next(ranks for ranks in islands if session.place.rank in ranks)
        return cls(group, ranks, model, events) if len(ranks) > 1 else None

    def share(self, shares: Sequence[float]) -> float:
        """Return the island's share of a whole batch, from all ranks' shares."""
        return sum(shares[rank] for rank in self._ranks)

    def sum_share(self, share: float) -> float:
        """Return the island's share of a whole batch, from this rank's share. Collective."""
        return sum(self._group.sum_numbers([share]))

    def opened(self, opened: Pass, share: float) -> Pass:
        """Return the pass with its weight in the gradient of the island, which has `share` of a whole batch."""
        return replace(opened, sampled=False, batch=replace(opened.batch, weight=opened.batch.weight / share))

    @torch.no_grad()
    def level(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the leader's values. Collective, with as many tensors of equal types and devices on all."""
        for kind in {(one.dtype, one.device): None for one in tensors}:
            same = [one for one in tensors if (one.dtype, one.device) == kind]
            flat = torch.cat([one.reshape(-1) for one in same])
            self._group.level(flat, "taking the weights of the island's leader")
            if self._group.rank:
                for one, part in zip(same, torch.split(flat, [one.numel() for one in same]), strict=True):
                    one.copy_(part.view_as(one))

    def level_optimizer(self, optimizer: OptimizerState) -> None:
        """Give every rank the leader's moments. Collective. Raises BadInput where the others have other moments."""
        states = optimizer.state_dict()["state"]
        kept = [one for _, state in sorted(states.items()) for _, one in sorted(state.items())]
        moments = [one for one in kept if isinstance(one, torch.Tensor)]
        entries = sum(one.numel() for one in moments)
        if len({tuple(row) for row in self._group.gather_rows([len(moments), entries])}) > 1:
            raise BadInput(f"the optimizer of rank {self._ranks[0]} has other moments than those of its island's mates")
        if moments:
            self.level(moments)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the island's ranks, on the CPU; in place. Collective."""
        self._group.sum_in_place(tensor, "handing over what the island had not sent")
        return tensor

    def any(self, said: bool) -> bool:
        """Return True if it is true on any rank of the island. Collective."""
        return any(row[0] for row in self._group.gather_rows([int(said)]))


class ReplicaWeights:
    """Live weights of an island of several workers.

    The leader brings them level at a boundary, all at once, and its mates copy them then."""

    def __init__(
        self,
        weights: LiveWeights,
        exchange: LayerExchange,
        replica: Replica,
        forward: ForwardWeights,
        required: Callable[[], int],
    ) -> None:
        """weights: of this rank, without hooks. forward, required: as LiveWeights has it."""
        self._weights, self._exchange, self._replica, self._forward = weights, exchange, replica, forward
        self._required = required
        self._at = 0  # the sync round that the weights are level with

    def backward_begins(self) -> None: ...

    def boundary(self, *, wait_for: int | None) -> None:
        """Bring tensors that are due level, as LiveWeights.boundary does; collective in the island."""
        begin, self._at = self._at, self._required() if wait_for is None else wait_for
        come = range(begin + 1, self._at + 1)
        due = [one for one in self._exchange.tensors if any(self._exchange.is_due(one, number) for number in come)]
        if due and self._exchange.leads:
            self._weights.bring_level(due, self._at)
        elif due:
            self._exchange.await_shared_params(due, self._at)
        self._replica.level([tensor.live for tensor in due])
        self._replica.level(self._forward.take(self._exchange.tensors))

    def close(self) -> None: ...


def _nothing(busy: bool) -> None: ...
