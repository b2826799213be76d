"""Adam's second moment of the whole batch's gradient, in the optimizer of an island that sees a part of the batch.

Let the gradient of island i be signal s_i and noise n_i, and a_i its share of the whole batch. Adam divides by the root
of

    v_i = s_i² + n_i²    on its own,    v = (sum a_i s_i)² + sum a_i² n_i²    with the whole batch.

Of K islands with shares 1/K, v is a K-th of v_i where noise dominates, and 1/K² where the gradient is island i's
alone. An island to which a parameter means nothing divides its noise by its own small root. It moves the parameter as
far as an island to which it means everything. So the mean of the islands' own updates is up to K times too small,
unevenly, and learns less in a step than the whole batch's update. With one v for all, the mean of their updates is that
update.

So each island reports its part w_i = a_i² n_i² + a_i s_i² of v now and then, as means over blocks. Blocks are rows or
lie within one: neighbouring rows may be words that another island alone reads. The sum of the parts is v where signals
agree, and no less than v where they do not. Between two sums, v is the island's own v_i times their ratio r, entry by
entry and whatever the gradients are: before each update v is moved so that Adam adds r (1 - beta2) g² to it.

Noise alone requires r = a_i, and a gradient that one island alone has requires a_i². r stays between a_i / WITHIN and
WITHIN / a_i. So an island among many cannot run ahead of what the others know of it by a factor of their number.

All of this state is in the optimizer's state, so it goes wherever v goes: into each rank's part of a checkpoint, and
from one process to the next. Sums that are under way are not stored. The island's report is, and is sent again.

State. B blocks of a parameter, N entries, M blocks of all parameters with an Adam:

| attribute or key    | type               | meaning                           | written                               |
| ------------------- | ------------------ | --------------------------------- | ------------------------------------- |
| `whole_batch_ratio` | float32 [B]        | r, the last factor of v_i         | `take`; `forget` removes it           |
| `told_own_means`    | float32 [B]        | m at the report                   | `told`; `forget_told` removes it      |
| `told_means`        | float32 [B]        | w, the reported part              | as `told_own_means`                   |
| `told_after`        | int                | update of the report              | as `told_own_means`                   |
| `told_late`         | int                | delay requested, in updates       | as `told_own_means`                   |
| `_Adam.factor`      | [N], [B] or None   | (r - 1) (1 - beta2) / beta2       | `square`; None when r changes         |
| `_late`             | bool               | gradients come within the update  | `_before` each step                   |
| `_muted`            | bool               | squares are not weighed           | `mute`, once                          |
| `_narrow`           | {id: 16 bits [N]}  | v before, then after the update   | `_before`, `_weigh`; `_after` empties |
| `._told_B`          | float32 [M]        | the report, then the islands' sum | `_split`; the sums, in place          |
| `._left`            | views of `_told_B` | pieces whose sum has not begun    | `_split`; `_begin_next` takes one     |
| `._under_way`       | [UnderWay]         | sums that have begun              | `_begin_next`; `updated` empties it   |
| `._late`            | int                | delay of the last report          | `_split`                              |
| `.begun`            | int                | job's update at which they began  | `begin`, once a view                  |

The first five names are keys of the optimizer's state. `_late` to `_narrow` are of `SecondMoments`, the rest
of `MomentSync`.

Equations, by blocks. a is the island's share, t Adam's step, q = (1 - beta1) / (1 + beta1):

    m  = mean(exp_avg_sq) / (1 - beta2^t) / r                                    own_mean_B; r = 1 before a sum
    s² = clamp((mean(exp_avg²) / (1 - beta1^t)² - q m) / (1 - q), 0, m)          signal_B
    w  = a² (m - s²) + a s²                                                      told
    r' = clamp((sum of all w + TINY) / (m + TINY), a / WITHIN, WITHIN / a)       SecondMoments.take; r if it is NaN
    v <- v r' / r                                                                _Adam.take
    v <- v + (r - 1) (1 - beta2) / beta2 g²     before each update               weighed_squares.py
    v <- max(0, v + (r - 1) (1 - beta2) g²)     or after it, where `_late`"""

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
"""Entries of a parameter that share a ratio: BLOCK at most, and NARROW at least where its rows have no more."""
RATIO: Final = "whole_batch_ratio"
"""Key in a parameter's state: the last factor of v_i, float32 [blocks]."""
OWN: Final = "told_own_means"
"""Key from a report until its sum is taken: means of v_i at the report, float32 [blocks]."""
TOLD: Final = "told_means"
"""Key for as long: the reported parts, float32 [blocks]."""
TOLD_AFTER: Final = "told_after"
"""Key for as long: the update after which it was reported, as `MomentSync` counts them; an int."""
TOLD_LATE: Final = "told_late"
"""Key for as long: the requested delay of the sum in updates beyond `span_of`; an int."""
TOLD_FIRST: Final = 8
TOLD_EVERY: Final = 64
"""Updates between two reports of the islands. Earlier ones are at each power of two from TOLD_FIRST on."""
SPANS: Final = (8, 32)
"""Updates, least and most, over which the pieces of a report leave. One leaves in each, so that they do not block a
thin link."""
WITHIN: Final = 4.0
"""Bound of r: from an island's share / WITHIN to WITHIN / its share."""
TINY: Final = 1e-30


@dataclass(slots=True, eq=False)
class _Adam:
    """State of one parameter's optimizer. B blocks."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    block: int
    """Entries of the parameter that share a ratio."""
    factor: torch.Tensor | None = None
    """(r - 1) (1 - beta2) / beta2: of each entry where the parameter is small, else of each block."""

    @property
    def state(self) -> MutableMapping[str, Any]:
        """Return exp_avg, exp_avg_sq and step; empty before the first update."""
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
        """Return means of v_i, without the bias of the first updates."""
        mean_B = _means(self._tensor("exp_avg_sq"), self.block) / self._unbiased(self.group["betas"][1])
        return mean_B / self._tensor(RATIO) if RATIO in self.state else mean_B

    def signal_B(self, own_B: torch.Tensor) -> torch.Tensor:
        """Return means of s_i². The first moment's noise is that of a mean of gradients, a known share of v_i."""
        beta1 = float(self.group["betas"][0])
        noise = (1 - beta1) / (1 + beta1)
        first_B = _means(self._tensor("exp_avg"), self.block, squared=True) / self._unbiased(beta1) ** 2
        return ((first_B - noise * own_B) / (1 - noise)).clamp_min(0).minimum(own_B)

    def square(self) -> WeighedSquare | None:
        """Return what Adam squares in the update under way. None: nothing, or the square counts unchanged."""
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
        """Set the ratio: from now on v is `ratio_B` times v_i."""
        before = self._tensor(RATIO) if RATIO in self.state else 1.0
        _multiply(self._tensor("exp_avg_sq"), self.block, ratio_B / before)
        self.state[RATIO], self.factor = ratio_B, None

    def forget(self, *names: str) -> None:
        self.factor = None
        for name in names:
            self.state.pop(name, None)


def kept_bytes(parameter: torch.Tensor) -> int:
    """Return the most bytes that this module adds to the parameter's state.

    They are the ratio, and until a sum is taken the island's own means and the reported parts."""
    return 3 * torch.float32.itemsize * -(-parameter.numel() // block_of(parameter))


def told_after(updates: int) -> bool:
    """Return True if islands report after so many updates together."""
    return updates > 0 and last_told(updates) == updates


def last_told(updates: int) -> int:
    """Return the update of the islands' last report, given so many updates; 0: not yet."""
    if updates >= TOLD_EVERY:
        return updates - updates % TOLD_EVERY
    return 1 << updates.bit_length() - 1 if updates >= TOLD_FIRST else 0


def late_of(updates: int, asked: int) -> int:
    """Return the updates beyond `span_of` after which the sum is taken.

    They are as many as `asked`, but the sum is taken before the islands' next report."""
    following = updates + TOLD_EVERY if updates >= TOLD_EVERY else 2 * updates
    return min(asked, following - updates - span_of(updates))


def span_of(updates: int) -> int:
    """Return the updates from a report until its sum is taken. The number is fixed, so runs can be repeated."""
    return max(SPANS[0], min(SPANS[1], updates // 2))


class SecondMoments:
    """Second moments of one rank's optimizers. Parameters without an Adam are neither reported nor changed.

    Vectors of means are over the blocks of all parameters with an Adam. They are as long on every rank. Methods run on
    the training thread, between two updates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor]) -> None:
        """parameters: those that are exchanged, in an order that is the same on all ranks."""
        held = {id(one): (by, group) for by in optimizers for group in by.param_groups for one in group["params"]}
        self._adams = [
            _Adam(one, by, group, block_of(one))
            for one, (by, group) in ((one, held[id(one)]) for one in parameters if id(one) in held)
            if "betas" in group and group["betas"][1] > 0 and not group.get("amsgrad")
        ]
        self._late = False  # the gradients of the update under way come within it
        self._muted = False
        self._narrow: dict[int, torch.Tensor] = {}  # by id of an _Adam whose v has 16 bits: v before, then after it
        self._hooks = [hook for by in optimizers for hook in self._hooked(by)]

    def _hooked(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def mute(self) -> None:
        """Stop weighing squares. It may be called within an optimizer's step, whose hooks torch cannot remove then."""
        self._muted = True

    def close(self) -> None:
        """Remove the hooks, between two steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __len__(self) -> int:
        """Return the number of parameters that an Adam has."""
        return len(self._adams)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Weigh the newest square before the update, where the gradients are known.

        They are known only after the update where a closure computes them within the step, or the optimizer itself
        removes a GradScaler's factor. Then the newest square counts in full in its own update."""
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
        """Weigh the newest square by r: Adam makes beta2 v + (1 - beta2) g² of v; a term is added before or after."""
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
        """Return this island's part of v, block by block: a² n_i² + a s_i², where a is its share of a whole batch.

        Zeros where there was no update yet. updates: the update after which it is reported. late: the requested delay
        of the sum in updates."""
        for adam in self._adams:
            if adam.known:
                own_B = adam.own_mean_B()
                signal_B = adam.signal_B(own_B)
                told_B = share * share * (own_B - signal_B) + share * signal_B
                finite_B = told_B.nan_to_num(nan=0.0, posinf=0.0)  # one island's overflow is its own
                adam.state.update({OWN: own_B, TOLD: finite_B, TOLD_AFTER: updates, TOLD_LATE: late})
        return self.told_last()

    def told_last(self) -> torch.Tensor:
        """Return a copy of the report whose sum was not taken yet."""
        nothing = (torch.zeros(adam.blocks, device=adam.parameter.device) for adam in self._adams)
        return torch.cat([adam.state.get(TOLD, zeros_B) for adam, zeros_B in zip(self._adams, nothing, strict=True)])

    @property
    def told_after(self) -> int:
        """Return the update of that report; 0: there is nothing that can be summed again.

        torch's optimizers load the state of a 16-bit parameter in 16 bits, which is not what was reported."""
        kept = [adam.state for adam in self._adams if TOLD in adam.state]
        found = {int(state[TOLD_AFTER]) for state in kept}
        exact = all(state[TOLD].dtype == torch.float32 for state in kept)
        return found.pop() if len(found) == 1 and exact else 0

    @property
    def told_late(self) -> int:
        """Return the delay of its sum in updates that was requested then."""
        return max((int(adam.state.get(TOLD_LATE, 0)) for adam in self._adams), default=0)

    @torch.no_grad()
    def take(self, total_B: torch.Tensor, share: float) -> None:
        """Take the sum of all islands' last reports. share: this island's present share of a whole batch."""
        parts = torch.split(total_B, [adam.blocks for adam in self._adams])
        for adam, part_B in zip(self._adams, parts, strict=True):
            if OWN in adam.state:
                ratio_B = (part_B + TINY) / (adam.state[OWN] + TINY)
                before = adam.state.get(RATIO, torch.ones_like(ratio_B))  # unchanged where own means were not finite
                adam.take(torch.where(ratio_B.isnan(), before, ratio_B.clamp(share / WITHIN, WITHIN / share)))
        self.forget_told()

    def forget_told(self) -> None:
        """Drop the report: it is not summed any more."""
        for adam in self._adams:
            adam.forget(OWN, TOLD, TOLD_AFTER, TOLD_LATE)

    def forget(self) -> None:
        """Drop all of this state: from now on v is the island's own, which is the whole batch's."""
        for adam in self._adams:
            adam.forget(RATIO, OWN, TOLD, TOLD_AFTER, TOLD_LATE)


class MomentSync:
    """Sync of second moments between islands, over torch.distributed, beside training. On the training thread.

    Reports are counted from the update after which exactly these islands began to sum. So a run that resumes with the
    same islands from a checkpoint behaves as an undisturbed one: the report is summed again, and is the same.

    A ring over n ranks takes 2 (n - 1) transfers one after the other, where an exchange through an aggregator takes
    two. So where others' updates may come more than a step late, pieces begin less often by the same factor, and the
    sum is taken that much later."""

    def __init__(self, moments: SecondMoments, group: Group, *, leads: bool) -> None:
        """leads: this rank leads its island. Made on every rank, with as many parameters."""
        self._moments, self._group, self._leads = moments, group, leads
        self._told_B = torch.empty(0)
        self._left: deque[torch.Tensor] = deque()  # pieces of it whose sum has not begun
        self._under_way: list[UnderWay] = []
        self._late = 0  # delay that the last report requested
        self.begun = 0
        """Update of the job after which the islands began to sum."""

    def begin(self, updates: int, begun: int | None) -> None:
        """Begin, or resume sums that were under way, after so many updates of the job. Collective; raises PeerLost.

        begun: the update after which the same islands began to sum, if this rank has the optimizer that it had then;
        None: they begin now."""
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
        """Advance after an update: take a sum that is due, report, or begin the next piece. Raises PeerLost.

        updates: the job's so far, as on all ranks. share: the island's share of a whole batch. staleness: steps that
        others' updates may come late, the same on all ranks."""
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
        """Split the report into pieces: one per 1 + `late` updates."""
        self._late = late
        self._told_B = self._moments.told_last()
        if not self._leads:
            self._told_B.zero_()
        self._left.extend(torch.chunk(self._told_B, -(-span_of(told) // (1 + late))))

    def _begin_next(self, since: int) -> None:
        """Begin the sum of the next piece if it is due. since: updates since the report."""
        if self._left and since % (1 + self._late) == 0:
            self._under_way.append(self._group.begin_sum(self._left.popleft(), "telling second moments"))


def block_of(parameter: torch.Tensor) -> int:
    """Return how many entries share a ratio: whole rows, or whole parts of one.

    A row belongs to a word or a class, which may be one island's alone."""
    row = math.prod(parameter.shape[1:]) if parameter.dim() > 1 and parameter.is_contiguous() else 0
    if 0 < row <= BLOCK:
        return row * -(-NARROW // row)
    return next((part for part in range(BLOCK, BLOCK // 2, -1) if row % part == 0), BLOCK)


def _means(moment: torch.Tensor, block: int, *, squared: bool = False) -> torch.Tensor:
    """Return means over blocks, float32 [blocks]; the last block may be short."""
    parts = (part.square() if squared else part for part in by_blocks(_flat(moment).float(), block))
    return torch.cat([part.mean(-1).view(-1) for part in parts if part.numel()])


def _multiply(moment: torch.Tensor, block: int, factor_B: torch.Tensor) -> None:
    flat = _flat(moment)
    for part, factor in zip(by_blocks(flat, block), of_blocks(factor_B, flat, block), strict=True):
        part.mul_(factor)


def _flat(moment: torch.Tensor) -> torch.Tensor:
    """Return the moment flat, in the order of memory, which is that of the parameter."""
    view = flat_view(moment)
    assert view is not None  # torch lays a moment out as its parameter, which has a flat view
    return view
