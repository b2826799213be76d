"""Adam's second moment of the whole batch's gradient, in the optimizer of an island that sees a part of the batch.

Let the gradient of island i be signal s_i and noise n_i, and a_i its share of the whole batch. Adam divides by the root
of

    v_i = s_i² + n_i²    on its own,    v = (sum a_i s_i)² + sum a_i² n_i²    with the whole batch.

Of K islands with shares 1/K, v is a K-th of v_i where noise rules, and 1/K² where the gradient is island i's alone; an
island to which a parameter means nothing divides its noise by its own small root and moves it as far as one to which it
means all. So the mean of the islands' own updates is up to K times too small, unevenly, and learns less in a step than
the whole batch's would. With one v for all, the mean of their updates is that update.

So each island tells its part w_i = a_i² n_i² + a_i s_i² of v now and then, as means over blocks, which are rows or lie
within one: neighbours may be words that another island alone reads. The sum of these is v where signals agree, and no
less than v where they do not. Between, v is the island's own v_i times their ratio r, entry by entry and whatever the
gradients are: before each update v is moved so that r (1 - beta2) g² is what Adam adds to it.

Noise alone asks for r = a_i, and a gradient that one island alone has for a_i². r stays within a factor of four of a_i
and of its inverse, so that no island of many runs ahead of what the others know of it by its own count of them.

All that is known of this is in the optimizer's state, so it goes wherever v goes: into each rank's part of a
checkpoint, and from one process to the next. Sums that are under way are not: what the island told is, and is told once
more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from atoll.agent.runtime.model.memory_order import flat_view
from atoll.agent.runtime.transport.collectives import UnderWay
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.shared_params.weighed_squares import (
    SMALL,
    WeighedSquare,
    by_blocks,
    is_narrow,
    of_blocks,
    weigh,
)

BLOCK: Final = 64
NARROW: Final = 8
"""Entries of a parameter that share a ratio, at most, and at least where its rows have no more."""
RATIO: Final = "whole_batch_ratio"
"""In the state of a parameter: what v_i was multiplied by last, float32 [blocks]."""
OWN: Final = "told_own_means"
"""From telling until the sum is taken: means of v_i when it was told, float32 [blocks]."""
TOLD: Final = "told_means"
"""As long: what was told of them."""
TOLD_AFTER: Final = "told_after"
"""As long: after how many updates, as `MomentSync` counts them; an int."""
TOLD_LATE: Final = "told_late"
"""As long: how many updates later than `span_of` says the sum may be, as was asked for; an int."""
TOLD_FIRST: Final = 8
TOLD_EVERY: Final = 64
"""Updates between two times that islands tell; before, at each power of two."""
SPANS: Final = (8, 32)
"""Updates, least and most, over which pieces of what is told leave, one in each, so that a thin link is not held up."""
WITHIN: Final = 4.0
"""r is so many times an island's share at least, and so many times less than 1 ÷ its share at most."""
TINY: Final = 1e-30


@dataclass(slots=True, eq=False)
class _Adam:
    """What one parameter's optimizer keeps. B blocks."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    block: int
    """Its entries that share a ratio."""
    factor: torch.Tensor | None = None
    """(r - 1) (1 - beta2) / beta2: of each entry where the parameter is small, else of each block."""

    @property
    def state(self) -> MutableMapping[str, Any]:
        """exp_avg, exp_avg_sq and step; empty before its first update."""
        found: MutableMapping[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    def _tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.state[name]
        return found

    @property
    def blocks(self) -> int:
        return -(-self.parameter.numel() // self.block)

    @property
    def known(self) -> bool:
        return {"exp_avg", "exp_avg_sq", "step"} <= self.state.keys()

    def _unbiased(self, beta: float) -> float:
        biased: float = float(beta) ** float(self.state["step"])
        return 1.0 - biased

    def own_mean_B(self) -> torch.Tensor:
        """Of v_i, without the bias of the first updates."""
        mean_B = _means(self._tensor("exp_avg_sq"), self.block) / self._unbiased(self.group["betas"][1])
        return mean_B / self._tensor(RATIO) if RATIO in self.state else mean_B

    def signal_B(self, own_B: torch.Tensor) -> torch.Tensor:
        """Means of s_i²: the first moment's noise is that of a mean of gradients, a known share of v_i."""
        beta1 = float(self.group["betas"][0])
        noise = (1 - beta1) / (1 + beta1)
        first_B = _means(self._tensor("exp_avg"), self.block, squared=True) / self._unbiased(beta1) ** 2
        return ((first_B - noise * own_B) / (1 - noise)).clamp_min(0).minimum(own_B)

    def square(self) -> WeighedSquare | None:
        """What Adam squares in the update under way; None where nothing is, or where it counts as it is."""
        gradient, decay = self.parameter.grad, self.group.get("weight_decay", 0.0)
        if gradient is None or RATIO not in self.state:
            return None
        if decay != 0 and not self.group.get("decoupled_weight_decay", False):
            gradient = gradient + decay * self.parameter.detach()
        second, beta2 = self._tensor("exp_avg_sq"), float(self.group["betas"][1])
        if gradient.stride() != second.stride():
            gradient = torch.empty_like(second).copy_(gradient)
        if self.factor is None:
            factor_B = (self._tensor(RATIO).float() - 1) * ((1 - beta2) / beta2)
            is_small = second.numel() <= SMALL
            self.factor = factor_B.repeat_interleave(self.block)[: second.numel()] if is_small else factor_B
        return WeighedSquare(_flat(second), _flat(gradient), self.block, self.factor, beta2)

    def take(self, ratio_B: torch.Tensor) -> None:
        """From now on v is so many times v_i."""
        before = self._tensor(RATIO) if RATIO in self.state else 1.0
        _multiply(self._tensor("exp_avg_sq"), self.block, ratio_B / before)
        self.state[RATIO], self.factor = ratio_B, None

    def forget(self, *names: str) -> None:
        self.factor = None
        for name in names:
            self.state.pop(name, None)


def kept_bytes(parameter: torch.Tensor) -> int:
    """Of its state, at most: what it was multiplied by, and until a sum is taken its own means and what was
    told of them."""
    return 3 * torch.float32.itemsize * -(-parameter.numel() // block_of(parameter))


def told_after(updates: int) -> bool:
    """Whether islands tell each other after so many updates together."""
    return updates > 0 and last_told(updates) == updates


def last_told(updates: int) -> int:
    """After how many updates islands told each other last, of so many; 0: not yet."""
    if updates >= TOLD_EVERY:
        return updates - updates % TOLD_EVERY
    return 1 << updates.bit_length() - 1 if updates >= TOLD_FIRST else 0


def late_of(updates: int, asked: int) -> int:
    """Updates beyond `span_of` after which it is taken: as many as are asked for, but before islands tell each other
    again."""
    following = updates + TOLD_EVERY if updates >= TOLD_EVERY else 2 * updates
    return min(asked, following - updates - span_of(updates))


def span_of(updates: int) -> int:
    """Updates from those after which it was told until it is taken, which are always the same: runs can be repeated."""
    return max(SPANS[0], min(SPANS[1], updates // 2))


class SecondMoments:
    """Of one rank's optimizers; of parameters that no Adam has nothing is told or changed. Vectors of means are over
    the blocks of all that have one, as long on every rank. By the training thread, between two updates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        """parameters: those that are exchanged, in an order that is the same on all ranks."""
        held = {id(one): (by, group) for by in optimizers for group in by.param_groups for one in group["params"]}
        self._adams = [
            _Adam(one, by, group, block_of(one))
            for one, (by, group) in ((one, held[id(one)]) for one in parameters if id(one) in held)
            if "betas" in group and group["betas"][1] > 0 and not group.get("amsgrad")
        ]
        self._late = False  # of the update under way nothing is known before
        self._muted = False
        self._narrow: dict[int, torch.Tensor] = {}  # by id of an _Adam whose v has 16 bits: v before, then after it
        self._hooks = [hook for by in optimizers for hook in self._hooked(by)]

    def _hooked(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def mute(self) -> None:
        """Nothing is weighed any more. Also within an optimizer's step, whose hooks cannot be removed while torch calls
        them."""
        self._muted = True

    def close(self) -> None:
        """Between two steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __len__(self) -> int:
        """Parameters that an Adam has."""
        return len(self._adams)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Where a closure makes the gradients within the step, or the optimizer takes a GradScaler's factor off them
        itself, they are there after it: then the newest square counts in full in its own update."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        self._late = closure is not None or getattr(optimizer, "grad_scale", None) is not None
        weighed = [one for one in self._adams if one.optimizer is optimizer and RATIO in one.state]
        moments = {id(one): _flat(one.state["exp_avg_sq"]) for one in weighed if not self._muted}
        self._narrow = {key: second_N.clone() for key, second_N in moments.items() if is_narrow(second_N)}
        if not (self._late or self._muted):
            self._weigh(optimizer)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        overflow = getattr(optimizer, "found_inf", None)
        if self._late and (self._muted or (overflow is not None and bool(overflow))):
            return
        if self._late:
            self._weigh(optimizer)
        for adam in self._adams:
            if id(adam) in self._narrow:
                _flat(adam.state["exp_avg_sq"]).copy_(self._narrow[id(adam)])
        self._narrow = {}

    @torch.no_grad()
    def _weigh(self, optimizer: torch.optim.Optimizer) -> None:
        """Adam makes beta2 v + (1 - beta2) g² of v; with what is added before it, or after, r of the last is left."""
        wide = []
        for adam in self._adams:
            square = adam.square() if adam.optimizer is optimizer else None
            if square is not None and id(adam) in self._narrow:
                square.round_into(self._narrow[id(adam)], late=self._late)
            elif square is not None:
                wide.append(square)
        weigh(wide, late=self._late)

    @torch.no_grad()
    def told(self, share: float, updates: int, late: int = 0) -> torch.Tensor:
        """This island's part of v: a² n_i² + a s_i², block by block, at its share of a whole batch; zeros where there
        was no update yet. updates: after which it is told. late: that is asked for."""
        for adam in self._adams:
            if adam.known:
                own_B = adam.own_mean_B()
                signal_B = adam.signal_B(own_B)
                told_B = share * share * (own_B - signal_B) + share * signal_B
                finite_B = told_B.nan_to_num(nan=0.0, posinf=0.0)  # one island's overflow is its own
                adam.state.update({OWN: own_B, TOLD: finite_B, TOLD_AFTER: updates, TOLD_LATE: late})
        return self.told_last()

    def told_last(self) -> torch.Tensor:
        """What it told and did not take yet, in memory of its own."""
        nothing = (torch.zeros(adam.blocks, device=adam.parameter.device) for adam in self._adams)
        return torch.cat([adam.state.get(TOLD, zeros_B) for adam, zeros_B in zip(self._adams, nothing, strict=True)])

    @property
    def told_after(self) -> int:
        """The updates after which that was; 0: there is nothing that can be summed again. torch's optimizers load what
        a parameter of 16 bits has beside it in 16 bits: that is not what was told."""
        kept = [adam.state for adam in self._adams if TOLD in adam.state]
        found = {int(state[TOLD_AFTER]) for state in kept}
        exact = all(state[TOLD].dtype == torch.float32 for state in kept)
        return found.pop() if len(found) == 1 and exact else 0

    @property
    def told_late(self) -> int:
        """How late its sum may be, as was asked for then."""
        return max((int(adam.state.get(TOLD_LATE, 0)) for adam in self._adams), default=0)

    @torch.no_grad()
    def take(self, total_B: torch.Tensor, share: float) -> None:
        """The sum of what all islands told, when this one did last. share: of a whole batch, now."""
        parts = torch.split(total_B, [adam.blocks for adam in self._adams])
        for adam, part_B in zip(self._adams, parts, strict=True):
            if OWN in adam.state:
                ratio_B = (part_B + TINY) / (adam.state[OWN] + TINY)
                before = adam.state.get(RATIO, torch.ones_like(ratio_B))  # goes on where its own means were not finite
                adam.take(torch.where(ratio_B.isnan(), before, ratio_B.clamp(share / WITHIN, WITHIN / share)))
        self.forget_told()

    def forget_told(self) -> None:
        """What it told is not summed any more."""
        for adam in self._adams:
            adam.forget(OWN, TOLD, TOLD_AFTER, TOLD_LATE)

    def forget(self) -> None:
        """From now on v is the island's own, which is the whole batch's."""
        for adam in self._adams:
            adam.forget(RATIO, OWN, TOLD, TOLD_AFTER, TOLD_LATE)


class MomentSync:
    """Tells and takes, over torch.distributed, beside training. On the training thread.

    When islands tell is counted from the update after which the very same ones began to. So a run that goes on with the
    same from a checkpoint does as one that nothing happened to: what was told is summed once more, and is the same.

    A ring over n ranks is 2 (n - 1) ways one after the other, where an exchange through an aggregator is two. So where
    others' updates may come more than a step late, pieces begin as much less often, and the sum is taken as much
    later."""

    def __init__(self, moments: SecondMoments, group: Group, *, leads: bool) -> None:
        """leads: for its island. On every rank, with as many parameters."""
        self._moments, self._group, self._leads = moments, group, leads
        self._told_B = torch.empty(0)
        self._left: deque[torch.Tensor] = deque()  # pieces of it that nobody sums yet
        self._under_way: list[UnderWay] = []
        self._late = 0  # as was asked for when it was told last
        self.begun = 0
        """Updates of the job after which the islands began to tell each other."""

    def begin(self, updates: int, begun: int | None) -> None:
        """After so many updates of the job. begun: since when the same islands have told each other, as far as this
        rank has the optimizer that it had then; None: they begin now. Collective; raises PeerLost."""
        self.begun, same = updates if begun is None else begun, begun is not None
        together = updates - self.begun
        told, late = last_told(together), self._moments.told_late
        under_way = told > 0 and together < told + span_of(told) + late_of(told, late)
        if under_way:
            same = same and self._moments.told_after == told
        rows = self._group.gather_rows([int(same), int(under_way), late])
        if not all(row[0] and row == rows[0] for row in rows):
            self.begun, under_way = updates, False
        if under_way:
            self._split(told, late)
            for since in range(together - told + 1):
                self._begin_next(since)
        else:
            self._moments.forget_told()

    def updated(self, updates: int, share: float, staleness: int) -> None:
        """The optimizers made so many updates of the job, as on all ranks; the island has `share` of a whole batch, and
        others' updates may come so many steps late, on all ranks alike. Raises PeerLost."""
        together = updates - self.begun
        told = last_told(together - 1)
        if told and together == told + span_of(told) + late_of(told, self._late):
            for under_way in self._under_way:
                under_way.wait()
            self._under_way = []
            self._moments.take(self._told_B, share)
        if told_after(together):
            late = (self._group.world_size - 1) * max(0, staleness - 1)
            self._moments.told(share, together, late)
            self._split(together, late)
        self._begin_next(together - last_told(together))

    def _split(self, told: int, late: int) -> None:
        """Into pieces: one for an update, or for as many as it may be late and one more."""
        self._late = late
        self._told_B = self._moments.told_last()
        if not self._leads:
            self._told_B.zero_()
        self._left.extend(torch.chunk(self._told_B, -(-span_of(told) // (1 + late))))

    def _begin_next(self, since: int) -> None:
        """since: so many updates after it was told."""
        if self._left and since % (1 + self._late) == 0:
            self._under_way.append(self._group.begin_sum(self._left.popleft(), "telling second moments"))


def block_of(parameter: torch.Tensor) -> int:
    """Entries that share a ratio: whole rows, or whole parts of one. What a row is of, a word or a class, may be one
    island's alone."""
    row = math.prod(parameter.shape[1:]) if parameter.dim() > 1 and parameter.is_contiguous() else 0
    if 0 < row <= BLOCK:
        return row * -(-NARROW // row)
    return next((part for part in range(BLOCK, BLOCK // 2, -1) if row % part == 0), BLOCK)


def _means(moment: torch.Tensor, block: int, *, squared: bool = False) -> torch.Tensor:
    """Over blocks, float32 [blocks]; the last one may be short."""
    parts = (part.square() if squared else part for part in by_blocks(_flat(moment).float(), block))
    return torch.cat([part.mean(-1).view(-1) for part in parts if part.numel()])


def _multiply(moment: torch.Tensor, block: int, factor_B: torch.Tensor) -> None:
    flat = _flat(moment)
    for part, factor in zip(by_blocks(flat, block), of_blocks(factor_B, flat, block), strict=True):
        part.mul_(factor)


def _flat(moment: torch.Tensor) -> torch.Tensor:
    """In the order of memory, so in that of the parameter."""
    view = flat_view(moment)
    assert view is not None  # torch lays a moment out as its parameter, and of that it is known
    return view
