"""Worker half of strategy `compressed`: one call compresses a group of gradients, and one message sends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from atoll.agent.runtime.model.durable import Origin
from atoll.agent.runtime.model.memory_order import laid_out_as
from atoll.agent.runtime.model.model_state import plain_parameters
from atoll.agent.runtime.session.kernel_notice import announce_cpu_kernels
from atoll.agent.runtime.staging import staging_ring
from atoll.agent.runtime.step.measures.clock import marks_of
from atoll.agent.runtime.strategy_interface.capabilities import Pass, Reduction, WorkerContext, WorkerHalf
from atoll.strategies.compressed.algorithms import clip_norm_of, compressor_of, density_at, momentum_of
from atoll.strategies.compressed.codes.compressors import CodePlace
from atoll.strategies.compressed.cost_measuring import Measuring
from atoll.strategies.compressed.costs.link_costs import LearnedCosts
from atoll.strategies.compressed.costs.timing import TIMED_EVERY_PASSES, PassTimes
from atoll.strategies.compressed.exchanges.group_sum import (
    STAGES,
    ExchangedGroup,
    GroupGradient,
    RankCircle,
    at_once,
    compressible,
)
from atoll.strategies.compressed.exchanges.messages import largest
from atoll.strategies.compressed.flat_state import FlatState
from atoll.strategies.compressed.groups.layout import GRADIENT_BYTES, TensorLayout
from atoll.strategies.compressed.groups.options import TensorGroup, Way
from atoll.strategies.compressed.plan import CompressedPlan
from atoll.strategies.compressed.settings import Compressed
from atoll.strategies.compressed.state import CompressedState
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.dense.worker import DenseReducer
from atoll.strategies.staged_sums.exchange import StagedExchange
from atoll.v1.common_pb2 import LEVEL_WARNING


def build(context: WorkerContext) -> WorkerHalf:
    """Build the worker half."""
    reducer = CompressedReducer(context)
    return WorkerHalf(reducer, durable=reducer.state, measures=reducer, learned=reducer.learned)


class CompressedReducer:
    """A RegroupingReducer and its Measures. All methods run on the training thread."""

    def __init__(self, context: WorkerContext) -> None:
        assert isinstance(context.settings, Compressed)
        self._session, self._channel, self._settings = context.session, context.channel, context.settings
        self._muted, self._loss_scale = context.events.muted, context.events.loss_scale
        self._scale = 1.0  # of the gradients of the pass under way; what is kept of them has none
        self._dense = DenseReducer(context.session.group)
        trained = [(name, one) for name, one in plain_parameters(context.model) if one.requires_grad]
        trained.reverse()
        self._trained = [one for _, one in trained]
        self._layout = TensorLayout.of([name for name, _ in trained], [one for _, one in trained])
        self._device = self._trained[0].device if self._trained else torch.device("cpu")
        announce_cpu_kernels(context.session, self._device)
        self._ring = staging_ring(self._device)  # of the thread that compresses
        self._compressor = compressor_of(context.settings, context.session.seed)
        self._momentum = momentum_of(context.settings)
        self._most = clip_norm_of(context.settings, context.session.place.world_size)
        self._residuals = FlatState(self._layout, self._device)
        self._velocity = FlatState(self._layout, self._device) if self._momentum else None
        self._optimizers = context.optimizers
        self.state = CompressedState(context.session, self._residuals, self._velocity)
        self._times = PassTimes([one for _, one in trained], marks_of(self._device))
        self._measuring = Measuring(context, self._layout, self._compressor, self._device, self._times)
        self._groups = self._layout.by_size(context.settings.min_bytes, Way(compressed=True))
        self._planned: list[TensorGroup] | None = None
        layout, ranks, tensors = self._layout, context.session.place.world_size, len(self._layout.names)
        most = [largest(ranks, layout.size(index, tensors), tensors) for index in range(tensors)]
        self._exchange = StagedExchange(self._channel, layout.names, most, STAGES)
        self._circle: RankCircle | None = None
        self._round = 0
        self._density = context.settings.density
        self._alone: list[RemovableHandle] = []
        self._opened = False  # the pass under way counts
        self._next = 0  # of the groups, the one that comes next
        self._left = 0  # groups whose sum is not here yet
        self._wire_bytes = self._plain_bytes = 0

    @property
    def learned(self) -> LearnedCosts:
        """Costs that the next view starts from."""
        return self._measuring.learned

    # --- a TensorReducer

    def start(self, origin: Origin | None) -> None:
        islands = self._channel.islands()
        self._circle = RankCircle.of(islands, self._session.place.rank)
        self._channel.connect_receiver(self._exchange.mailbox, self._layout.names)
        self._exchange.start()
        self.state.take_over(origin)
        self._measuring.start(self._exchange, self._circle, self._next_round)

    def start_alone(self, origin: Origin | None) -> None:
        """Train alone: others' residuals count in the first gradients of the only worker, and its momentum
        continues."""
        self.state.take_over(origin)
        if self._velocity is not None or self._most is not None:
            self._alone += [one.register_step_pre_hook(self._clip_and_add_velocity) for one in self._optimizers]
        for index, parameter in enumerate(self._trained):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._give_back, index))  # type: ignore[no-untyped-call]
            self._alone.append(hook)

    def fuse(self, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
        return [list(range(group.begin, group.end)) for group in self._groups]

    def regroup(self, params: PlanParameters) -> bool:
        planned = params.as_groups() if isinstance(params, CompressedPlan) else None  # started by hand there is none
        if planned is None or planned == self._planned:
            return False
        self._planned = planned
        if planned[-1].end != len(self._layout.names):
            self._session.notice(
                LEVEL_WARNING,
                f"a plan groups {planned[-1].end} tensors, and the model has {len(self._layout.names)}: groups stay",
            )
            return False
        before, self._groups = self._groups, self._layout.allowed(planned)
        self._measuring.regrouped()
        return before != self._groups

    def begin(self, opened: Pass) -> None:
        self._residuals.open()
        if self._velocity is not None:
            self._velocity.open()
        self._measuring.between_passes()
        self._next_round()
        self._next = self._left = 0
        self._opened, self._scale = not opened.muted, self._loss_scale()
        self._density = density_at(self._settings, opened.batch.step)
        self._times.begin(looked_at=self._round % TIMED_EVERY_PASSES == 0)

    def reduce(self, flat_N: torch.Tensor, used: Sequence[bool], ended: Callable[[object], None]) -> Reduction:
        with self._times.own_work():
            return self._reduce(flat_N, used, ended)

    def close(self) -> None:
        for hook in self._alone:
            hook.remove()
        self._times.close()
        self._exchange.close()

    # --- Measures

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        wire, self._wire_bytes = self._wire_bytes, 0
        plain, self._plain_bytes = self._plain_bytes, 0
        return {"compression": wire / plain if plain else 1.0, "stall_s": stall_s, "sent_bytes": sent_bytes}

    def statistics(self) -> Mapping[str, float]:
        squares = [float(one.square().sum()) for one in self._residuals.by_name().values()]
        return {"residual_norm": math.sqrt(sum(squares))}

    def _next_round(self) -> None:
        self._round += 1
        self._exchange.begin(self._round)

    @torch.no_grad()
    def _give_back(self, index: int, parameter: torch.Tensor) -> None:
        if self._muted():
            return
        left_out = self._residuals.give_back(index)
        if left_out is not None and parameter.grad is not None:
            parameter.grad.add_(laid_out_as(left_out, parameter), alpha=self._loss_scale())

    @torch.no_grad()
    def _clip_and_add_velocity(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Clip gradients and add momentum in a run of one worker, whose gradients are whole."""
        if self._muted():
            return
        places = {id(parameter): index for index, parameter in enumerate(self._trained)}
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            gradient, index = parameter.grad, places.get(id(parameter))
            if gradient is None or index is None:
                continue
            if self._most is not None:
                self._clip_tensor(gradient, self._most)
            if self._velocity is not None and compressible(gradient):
                velocity = laid_out_as(self._velocity.live(index), parameter)
                gradient.copy_(velocity.mul_(self._momentum).add_(gradient))

    # --- one group

    def _reduce(self, flat_N: torch.Tensor, used: Sequence[bool], ended: Callable[[object], None]) -> Reduction:
        entries = len(flat_N) - len(used)
        group = self._groups[self._next]
        self._next += 1
        self._left += 1
        self._clip(group, flat_N)
        if not group.way.compressed:
            if self._velocity is not None and compressible(flat_N[:entries]):
                sent = self._velocity.begin(group).mul_(self._momentum).add_(flat_N[:entries], alpha=1 / self._scale)
                flat_N[:entries].copy_(sent * self._scale)
            if (left_out := self._residuals.drain(group)) is not None:
                flat_N[:entries].add_(left_out, alpha=self._scale)
            reduction = self._dense.reduce(flat_N, used, ended)
            self._plain_bytes += entries * GRADIENT_BYTES
            self._wire_bytes += entries * GRADIENT_BYTES
            return Reduction(partial(self._finish_dense, reduction, group, flat_N[entries:]), reduction.sent_bytes)
        residual = self._residuals.begin(group)
        velocity = self._velocity.begin(group) if self._velocity is not None else None
        idle = self._set_aside(group, used, residual, velocity)
        under_way = self._submit(group, flat_N[:entries], used, residual, velocity, ended=ended)
        return Reduction(partial(self._finish, group, under_way, flat_N, idle), 0)

    def _submit(
        self,
        group: TensorGroup,
        gradient_N: torch.Tensor,
        used: Sequence[bool],
        residual: torch.Tensor,
        velocity: torch.Tensor | None,
        *,
        ended: Callable[[object], None],
    ) -> ExchangedGroup:
        assert self._circle is not None  # of `start`
        layout, entries = self._layout, len(residual)
        value = gradient_N.float()
        if self._scale != 1:
            value = value / self._scale
        place = CodePlace(self._round, layout.first[group.begin], layout.shapes[group.begin : group.end], self._density)
        counts = np.array(used, np.float32)
        # On a GPU the CPU's part works on copies, which the thread that compresses waits for: a hook that did would
        # hold up the backward pass. On processors everything is in the same memory.
        ready: Callable[[], object] = at_once
        if group.way.compress == "cpu" and self._ring is not None:
            (value, residual, *kept), ready = self._ring.crossing(
                [value, residual] if velocity is None else [value, residual, velocity]
            )
            velocity = kept[0] if kept else None
        out = (
            value
            if group.way.decompress == group.way.compress or self._device.type == "cpu"
            else (
                torch.empty(entries)
                if group.way.decompress == "cpu"
                else gradient_N.new_empty(entries, dtype=torch.float32)
            )
        )
        mine = GroupGradient(place, value, residual, counts, out, velocity, self._momentum, ready)
        under_way = ExchangedGroup(
            self._exchange, group.begin, self._circle, self._compressor, mine, way=group.way, ended=ended
        )
        self._plain_bytes += entries * GRADIENT_BYTES
        return under_way

    def _set_aside(
        self, group: TensorGroup, used: Sequence[bool], residual: torch.Tensor, velocity: torch.Tensor | None
    ) -> list[int]:
        """Return the places of tensors without a gradient on this rank; nothing of them is sent.

        Their residuals would take the place of entries that have a gradient, for good where a layer was frozen."""
        idle = [place for place, came in enumerate(used) if not came]
        for place in idle:
            residual[self._part(group, place)].zero_()
            if velocity is not None:
                velocity[self._part(group, place)].zero_()
        return idle

    def _resume_idle(self, group: TensorGroup, place: int) -> None:
        """Another rank had a gradient: add what this rank kept to what compressing the sum left out."""
        part, index = self._part(group, place), group.begin + place
        residual = self._residuals.after(group)[part]
        residual += self._residuals.before(index)
        if self._velocity is not None:
            residual += self._velocity.after(group)[part].copy_(self._momentum * self._velocity.before(index))

    def _part(self, group: TensorGroup, place: int) -> slice:
        """Return the entries of the group's tensor at this place."""
        first, index = self._layout.first, group.begin + place
        return slice(first[index] - first[group.begin], first[index + 1] - first[group.begin])

    def _clip(self, group: TensorGroup, flat_N: torch.Tensor) -> None:
        if self._most is not None:
            for index in range(group.begin, group.end):
                self._clip_tensor(flat_N[self._part(group, index - group.begin)], self._most * self._scale)

    @staticmethod
    def _clip_tensor(part: torch.Tensor, most: float) -> None:
        """Clip a tensor's part. It runs inside a hook, so it reads nothing from the device: the backward pass would
        wait."""
        norm = part.float().norm()
        part.mul_(torch.where((norm > most) & norm.isfinite(), most / norm, 1.0))

    def _finish(self, group: TensorGroup, under_way: ExchangedGroup, flat_N: torch.Tensor, idle: Sequence[int]) -> None:
        residual = self._residuals.after(group)
        velocity = self._velocity.after(group) if self._velocity is not None else None
        entries = len(residual)
        counts = under_way.finish(self._session.collective_timeout_s)
        mine = under_way.sum.mine
        if self._scale != 1:
            mine.out_N.mul_(self._scale)
        if mine.out_N.data_ptr() != flat_N.data_ptr():
            flat_N[:entries].copy_(mine.out_N)
        if mine.residual_N.data_ptr() != residual.data_ptr():
            residual.copy_(mine.residual_N)
        if velocity is not None and mine.velocity_N is not None and mine.velocity_N.data_ptr() != velocity.data_ptr():
            velocity.copy_(mine.velocity_N)
        for place in idle:
            if counts[place] > 0:
                self._resume_idle(group, place)
        self._keep_unused(group, counts.tolist())
        flat_N[entries:].copy_(torch.from_numpy(counts))
        self._wire_bytes += under_way.sum.payload_bytes
        self._done()

    def _finish_dense(self, reduction: Reduction, group: TensorGroup, counts: torch.Tensor) -> None:
        reduction.wait()
        self._keep_unused(group, counts.tolist())
        self._done()

    def _keep_unused(self, group: TensorGroup, counts: Sequence[float]) -> None:
        """Keep residual and momentum of tensors that have a gradient on no rank: their p.grad stays None."""
        for index in (group.begin + place for place, count in enumerate(counts) if count == 0):
            self._residuals.put_back(index)
            if self._velocity is not None:
                self._velocity.put_back(index)

    def _done(self) -> None:
        self._left -= 1
        if self._left == 0 and self._next == len(self._groups):
            self._residuals.complete = self._opened
            if self._velocity is not None:
                self._velocity.complete = self._opened
            self._times.combined()
            self._measuring.tell(self._groups)
