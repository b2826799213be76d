"""Strategy `dense`: the gradient of the whole batch on every rank, from unequal parts of it.

A rank with b_i of B samples weighs its mean gradient with b_i / B; the sum over ranks is then the mean over all B
samples. Weights sum to 1, so gradients that an earlier pass left in p.grad (accumulation) pass through unchanged."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from atoll.agent.runtime.api.session import Session
from atoll.agent.runtime.step.agreement import Agreed, Control
from atoll.agent.runtime.step.clock import marks_of
from atoll.agent.runtime.step.synchronisation import (
    Callbacks,
    Norms,
    Pass,
    StepNumbers,
    Synchronisation,
    Synchronous,
)
from atoll.agent.runtime.transport.process_groups import Group, collective
from atoll.errors import BadInput, PeerLost
from atoll.strategies.dense.buckets import Bucket, Slot, lay_out
from atoll.strategies.dense.exchange_times import ExchangeTimes
from atoll.strategies.dense.gradients import refuse_second, refuse_sparse, scale_into, squared_norm, total


def build(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, callbacks: Callbacks, agreed: Agreed
) -> Synchronisation:
    """agreed: what holds before the first pass."""
    del optimizer  # torch's own step is all it needs
    return DenseSynchroniser(model, session.group, callbacks, agreed) if session.group is not None else Synchronous()


class DenseSynchroniser(Synchronous):
    """The strategy: an exact all-reduce and an agreement in every pass."""

    def __init__(self, model: nn.Module, group: Group, callbacks: Callbacks, agreed: Agreed) -> None:
        """agreed: what holds before the first pass."""
        self._control = Control(group)
        self._reducer = DenseReducer(model, group, callbacks)
        self._agreed = agreed
        self._waited_s = 0.0

    def begin(self, opened: Pass) -> None:
        batch_slice = opened.batch_slice
        self._control.begin(batch_slice.step, opened.own, epoch=batch_slice.epoch, start=batch_slice.start)
        self._reducer.begin(batch_slice.weight, opened.sampled)

    def end(self) -> Norms:
        self._reducer.launch_rest()
        begun_s = time.monotonic()
        self._agreed = self._control.finish()
        self._reducer.wait()
        self._waited_s += time.monotonic() - begun_s
        return self._reducer.norms()

    def agreed(self, own: Agreed) -> Agreed:
        return self._agreed

    def waited(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def step_numbers(self) -> StepNumbers:
        sync_s, last_s = self._reducer.times.take()
        return StepNumbers(sync_s=sync_s, last_sync_s=last_s)

    def close(self) -> None:
        self._reducer.close()


class DenseReducer:
    """Bucketed all-reduce behind the backward pass: begin, then gradients come by hooks, then `launch_rest`, `wait`.

    Buckets leave strictly in order, on every rank the same, whatever order gradients come in. Gradients end up as
    views into the buckets (no copy back); a view is valid until the next backward pass."""

    def __init__(self, model: nn.Module, group: Group, callbacks: Callbacks) -> None:
        self._group = group
        self._callbacks = callbacks
        self._buckets: list[Bucket] = lay_out(model.named_parameters())
        self._frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
        self._works: list[dist.Work] = []
        self._gpu = next((b.flat.device for b in self._buckets if b.flat.device.type == "cuda"), None)
        # NCCL says that a collective has ended when it has begun.
        idle = callbacks.idle if self._gpu is None else _nothing
        self.times = ExchangeTimes(marks_of(self._gpu or torch.device("cpu")), idle)
        self._weight = 0.0
        self._sampled = False
        self._local_sqnorms: list[torch.Tensor | float] = []
        self.open = False
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for slot in bucket.slots
        ]

    def begin(self, weight: float, sampled: bool) -> None:
        """Open a pass. weight: this rank's b_i / B. sampled: measure the squared norms on the way.

        Raises BadInput if a parameter is trained now that was frozen: it has no place in the buckets."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise BadInput(
                    f"parameter {name} was frozen at run.prepare and requires a gradient now, which would not be "
                    "combined with the other ranks'. Let it require one before run.prepare and leave it out of the "
                    "optimizer, or at lr=0, until it shall move"
                )
        self._weight, self._sampled = weight, sampled
        self._local_sqnorms.clear()
        self.times.begin()
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.came = False
        self.open = True

    def launch_rest(self) -> None:
        """The backward pass is over: parameters without a gradient contribute zeros. Returns when this rank's device is
        done with it: what follows is waiting for others. Raises PeerLost."""
        with torch.no_grad():
            for bucket in self._buckets[len(self._works) :]:
                for slot in bucket.slots:
                    if not slot.came:
                        self._fill_missing(slot)
                self._launch(bucket)
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()  # costs nothing: the buckets end later still

    def wait(self) -> None:
        """Wait for every bucket, put the combined gradients into p.grad, close the pass. Raises PeerLost."""
        with collective("combining gradients"):
            for work in self._works:
                work.wait()
        self._callbacks.idle()
        self._works.clear()
        self.open = False
        for bucket in self._buckets:
            if bucket.missing:
                self._adopt_missing(bucket)

    def norms(self) -> Norms:
        """Of the gradients of this pass, while they are still in the buckets."""
        if not self._sampled:
            return Norms()
        return Norms(total(self._local_sqnorms), total([squared_norm(bucket.gradients) for bucket in self._buckets]))

    def close(self) -> None:
        """Take the hooks off the model again."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _on_gradient(self, slot: Slot, parameter: torch.Tensor) -> None:
        if not self.open:
            self._callbacks.begin()
        gradient = parameter.grad
        assert gradient is not None  # the hook runs after it was accumulated
        refuse_second(slot.name, slot.came)
        refuse_sparse(slot.name, gradient)
        if self._sampled and self._weight > 0:  # a sample at weight 0 says nothing, and may be NaN
            self._local_sqnorms.append(squared_norm(gradient))
        scale_into(slot.view, gradient, self._weight)
        parameter.grad = slot.view
        slot.came = True
        slot.bucket.missing -= 1
        try:
            while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].missing == 0:
                self._launch(self._buckets[len(self._works)])
        except PeerLost as error:
            self._callbacks.lost(error)

    def _launch(self, bucket: Bucket) -> None:
        bucket.used.fill_(1)
        if bucket.missing:
            for slot in bucket.slots:
                if not slot.came:
                    slot.used.zero_()
        self.times.expect()
        self._callbacks.before_launch()
        self._callbacks.busy()
        launched = self.times.launching()
        with collective("combining gradients"):
            work = dist.all_reduce(bucket.flat, group=self._group.data, async_op=True)
        assert work is not None  # async_op
        work.get_future().add_done_callback(launched)
        self._works.append(work)

    def _fill_missing(self, slot: Slot) -> None:
        earlier = slot.parameter.grad
        if earlier is None:
            slot.view.zero_()
        else:  # accumulated by an earlier pass, so every rank has it
            scale_into(slot.view, earlier, self._weight)
            slot.parameter.grad = slot.view

    @staticmethod
    def _adopt_missing(bucket: Bucket) -> None:
        """What no rank used keeps its p.grad of None: optimizers leave such parameters alone."""
        for slot in bucket.slots:
            if not slot.came and slot.parameter.grad is None and slot.used.item() > 0:
                slot.parameter.grad = slot.view


def _nothing() -> None: ...
