"""Adam's second moment of the whole batch's gradient, in the optimizer of an island that sees a part of the batch.

Let the gradient of island i be signal s_i and noise n_i, and a_i its share of the whole batch. Adam divides by the root
of

    v_i = s_i² + n_i²    on its own,    v = (sum a_i s_i)² + sum a_i² n_i²    with the whole batch.

Of K islands with shares 1/K, v is a K-th of v_i where noise rules, and 1/K² where the gradient is island i's alone; an
island to which a parameter means nothing divides its noise by its own small root and moves it as far as one to which it
means all. So the mean of the islands' own updates is up to K times too small, unevenly, and learns less in a step than
the whole batch's would. With one v for all, the mean of their updates is that update.

So each island tells its part w_i = a_i² n_i² + a_i s_i² of v now and then, as means over blocks: the sum of these is v
where signals agree, and no less than v where they do not. Between, v follows the island's own v_i by their ratio r.
Adam adds the island's own g² in each step, and so goes from r v_i towards v_i; it is put back every few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from atoll.agent.runtime.transport.collectives import UnderWay
from atoll.agent.runtime.transport.process_groups import Group
from atoll.strategies.shared_masters.layout import flat_view

BLOCK: Final = 64
"""Entries of a parameter that share a ratio."""
RATIO: Final = "whole_batch_ratio"
"""In the state of a parameter: what v_i was multiplied by last, float32 [blocks]. It goes wherever v goes."""
TOLD_FIRST: Final = 8
TOLD_EVERY: Final = 64
"""Updates between two times that islands tell; before, at each power of two."""
SPANS: Final = (8, 32)
"""Updates, least and most, over which pieces of what is told leave, one in each, so that a thin link is not held up."""
DRIFT: Final = 0.2
"""Share of v_i that Adam may have added before v is put back."""
MOST_UPDATES: Final = 64
"""Before v is put back."""
RATIOS: Final = (1e-6, 1e6)
TINY: Final = 1e-30


@dataclass(slots=True, eq=False)
class _Adam:
    """What one parameter's optimizer keeps. B blocks."""

    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer
    beta1: float
    beta2: float
    own_B: torch.Tensor | None = None  # means of v_i when they were told last
    updates: float = 0.0  # of the parameter since the job began; 0: not looked up yet
    since: int = 0  # updates since v was put back

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
        return -(-self.parameter.numel() // BLOCK)

    @property
    def known(self) -> bool:
        return {"exp_avg", "exp_avg_sq", "step"} <= self.state.keys()

    def count(self) -> None:
        """One more update was made."""
        self.since += 1
        if self.updates:
            self.updates += 1
        elif self.known:
            self.updates = float(self.state["step"])

    def gained(self, since: float) -> float:
        """Share of v_i that Adam added in so many updates, the last ones."""
        return float((1 - self.beta2**since) / (1 - self.beta2 ** max(self.updates, since)))

    @property
    def due(self) -> bool:
        return RATIO in self.state and (self.since >= MOST_UPDATES or self.gained(self.since + 1) > DRIFT)

    def now_B(self) -> torch.Tensor | float:
        """v ÷ v_i."""
        if RATIO not in self.state:
            return 1.0
        gained = self.gained(self.since) if self.since else 0.0
        return gained + (1 - gained) * self._tensor(RATIO)

    def own_mean_B(self) -> torch.Tensor:
        """Of v_i, without the bias of the first updates."""
        self.updates = float(self.state["step"])
        unbiased = float(1 - self.beta2**self.updates)
        return _means(self._tensor("exp_avg_sq")) / self.now_B() / unbiased

    def signal_B(self, own_B: torch.Tensor) -> torch.Tensor:
        """Means of s_i²: the first moment's noise is that of a mean of gradients, a known share of v_i."""
        noise = (1 - self.beta1) / (1 + self.beta1)
        unbiased = float(1 - self.beta1**self.updates)
        first_B = _means(self._tensor("exp_avg"), squared=True) / unbiased**2
        return ((first_B - noise * own_B) / (1 - noise)).clamp_min(0).minimum(own_B)

    def put_back(self, ratio_B: torch.Tensor) -> None:
        _multiply(self._tensor("exp_avg_sq"), ratio_B / self.now_B())
        self.state[RATIO], self.since = ratio_B, 0

    def ahead_of(self, wanted_B: torch.Tensor) -> torch.Tensor:
        """The ratio with which v is `wanted_B` times v_i half way until it is put back."""
        gains = DRIFT / 2
        return torch.maximum((wanted_B - gains) / (1 - gains), wanted_B / 4)


def told_after(updates: int) -> bool:
    """Whether islands tell each other after so many updates of this run."""
    return updates % TOLD_EVERY == 0 or (updates >= TOLD_FIRST and updates & (updates - 1) == 0)


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
            _Adam(one, by, *group["betas"])
            for one, (by, group) in ((one, held[id(one)]) for one in parameters if id(one) in held)
            if "betas" in group and not group.get("amsgrad")
        ]

    def __len__(self) -> int:
        """Parameters that an Adam has."""
        return len(self._adams)

    @torch.no_grad()
    def updated(self) -> None:
        """The optimizer made an update: v is put back where it is time."""
        for adam in self._adams:
            adam.count()
            if adam.due:
                adam.put_back(adam.state[RATIO])

    @torch.no_grad()
    def told(self, share: float) -> torch.Tensor:
        """This island's part of v: a² n_i² + a s_i², block by block, at its share of a whole batch; zeros where there
        was no update yet."""
        return torch.cat([self._told(adam, share) for adam in self._adams])

    def _told(self, adam: _Adam, share: float) -> torch.Tensor:
        if not adam.known:
            adam.own_B = None
            return torch.zeros(adam.blocks, device=adam.parameter.device)
        own_B = adam.own_B = adam.own_mean_B()
        signal_B = adam.signal_B(own_B)
        told_B = share * share * (own_B - signal_B) + share * signal_B
        return told_B.nan_to_num(nan=0.0, posinf=0.0)  # one island's overflow is its own

    @torch.no_grad()
    def take(self, total_B: torch.Tensor) -> None:
        """The sum of what all islands told, when this one did last."""
        parts = torch.split(total_B, [adam.blocks for adam in self._adams])
        for adam, part_B in zip(self._adams, parts, strict=True):
            if adam.own_B is not None:
                adam.put_back(adam.ahead_of(((part_B + TINY) / (adam.own_B + TINY)).clamp(*RATIOS)))


class ToldMoments:
    """Tells and takes, over torch.distributed, beside training. On the training thread."""

    def __init__(self, moments: SecondMoments, group: Group, *, leads: bool) -> None:
        """leads: for its island. On every rank, with as many parameters."""
        self._moments, self._group, self._leads = moments, group, leads
        self._told_B = torch.empty(0)
        self._left: deque[torch.Tensor] = deque()  # pieces of it that nobody sums yet
        self._under_way: list[UnderWay] = []
        self._due = 0  # the updates at which it is taken

    def updated(self, updates: int, share: float) -> None:
        """The optimizer made so many updates of this run, as on all ranks; the island has `share` of a whole batch.
        Raises PeerLost."""
        self._moments.updated()
        if updates == self._due:
            for under_way in self._under_way:
                under_way.wait()
            self._under_way = []
            self._moments.take(self._told_B)
        if told_after(updates):
            self._due = updates + span_of(updates)
            self._told_B = self._moments.told(share)
            if not self._leads:
                self._told_B.zero_()
            self._left.extend(torch.chunk(self._told_B, span_of(updates)))
        if self._left:
            self._under_way.append(self._group.begin_sum(self._left.popleft(), "telling second moments"))


def _means(moment: torch.Tensor, *, squared: bool = False) -> torch.Tensor:
    """Over blocks, float32 [blocks]; the last one may be short."""
    flat = _flat(moment).float()
    whole = flat.numel() // BLOCK * BLOCK
    rows = flat[:whole].view(-1, BLOCK)
    means = [rows.square().mean(1) if squared else rows.mean(1)]
    if whole < flat.numel():
        tail = flat[whole:]
        means.append((tail.square() if squared else tail).mean().view(1))
    return torch.cat(means)


def _multiply(moment: torch.Tensor, factor_B: torch.Tensor) -> None:
    flat = _flat(moment)
    whole = flat.numel() // BLOCK
    flat[: whole * BLOCK].view(whole, BLOCK).mul_(factor_B[:whole, None])
    flat[whole * BLOCK :].mul_(factor_B[whole:])


def _flat(moment: torch.Tensor) -> torch.Tensor:
    """In the order of memory, so in that of the parameter."""
    view = flat_view(moment)
    assert view is not None  # torch lays a moment out as its parameter, and of that it is known
    return view
