"""Live weights of a model: others' updates come into them when a forward pass begins, and never in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from atoll.agent.runtime.agent_link.waiting import waiting
from atoll.agent.runtime.model.module_hooks import ModuleHook
from atoll.errors import AtollError, DeadlineExceeded, PeerLost
from atoll.strategies.shared_params.engine_tensors import EngineTensor, forward_tensors
from atoll.strategies.shared_params.exchange import LayerExchange
from atoll.strategies.shared_params.forward_weights import ForwardWeights
from atoll.strategies.shared_params.layout import add_blocks, write_blocks
from atoll.strategies.shared_params.measures import Tally


class LiveWeights:
    """Live weights that forward pre-hooks bring level.

    A module's hook brings its tensors level, once between two boundaries. A tensor that is used without the forward
    pass of such a module is brought level at the boundary."""

    def __init__(
        self,
        model: nn.Module,
        exchange: LayerExchange,
        tally: Tally,
        forward: ForwardWeights,
        *,
        additive: bool,
        required: Callable[[], int],
        lost: Callable[[AtollError], None],
    ) -> None:
        """forward: the weights that passes use. additive: others' updates are added to the weights, else the shared
        parameters' values replace them. required: the sync round that a forward pass must have. lost: called inside a
        forward pass with the loss of a peer."""
        self._exchange, self._tally, self._forward, self._additive = exchange, tally, forward, additive
        self._required, self._lost = required, lost
        self._level: set[int] = set()  # tensors that were brought level since the boundary
        self._unhooked: set[int] = set()
        self._hooks = [
            module.register_forward_pre_hook(ModuleHook(self._before_forward, held))
            for module, held in forward_tensors(model, exchange.tensors)
        ]

    def backward_begins(self) -> None:
        """Note the tensors that no forward pass brought level until now: no hook does it."""
        self._unhooked.update(one.number for one in self._exchange.tensors if one.number not in self._level)

    def boundary(self, *, wait_for: int | None) -> None:
        """Bring tensors without a hook level. wait_for: bring all tensors to this sync round. Raises PeerLost."""
        self._level.clear()
        if wait_for is not None:
            self.bring_level(self._exchange.tensors, wait_for)
        elif self._unhooked:
            unhooked = [one for one in self._exchange.tensors if one.number in self._unhooked]
            self.bring_level(unhooked, self._required())
            self._forward.take(unhooked)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_forward(self, held: Sequence[EngineTensor], module: nn.Module, inputs: Any) -> None:
        if not self._exchange.started:
            return  # a parametrized weight is computed by a forward pass whenever it is read, in run.prepare too
        missing = [one for one in held if one.number not in self._level]
        if missing:
            try:
                self.bring_level(missing, self._required())
            except PeerLost as error:
                self._lost(error)
        self._forward.take(held)

    def bring_level(self, tensors: Sequence[EngineTensor], number: int) -> None:
        """Bring tensors to sync round `number` at least; a newer one is taken if it is there. Raises PeerLost."""
        self._exchange.check_copies()
        on_cpu = [one for one in tensors if one.on_cpu]
        try:
            if on_cpu:
                with waiting:
                    _, fresh, waited_s = self._exchange.engine.fetch(
                        [one.number for one in on_cpu], number, self._exchange.deadline_s
                    )
                self._tally.fetched(len(on_cpu), fresh, waited_s)
            if off_cpu := [one for one in tensors if not one.on_cpu]:
                self._take_changes(off_cpu, number)
        except DeadlineExceeded as error:
            raise PeerLost(str(error)) from error
        self._level.update(one.number for one in tensors)

    def _take_changes(self, tensors: Sequence[EngineTensor], number: int) -> None:
        """Apply changes to weights that are not in the CPU's memory."""
        numbers = [one.number for one in tensors]
        if self._additive:
            # A copy that was taken before the others' part is in the weights must be compared before it is.
            self._exchange.await_selected(numbers)
        with waiting:
            waited_s, changes = self._exchange.engine.changes(numbers, number, self._exchange.deadline_s)
        fresh = sum(change.version > number for change in changes)
        self._tally.fetched(len(tensors), fresh, waited_s)
        publish = add_blocks if self._additive else write_blocks
        for one, change in zip(tensors, changes, strict=True):
            publish(one.live, change.index, change.values)
