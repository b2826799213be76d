"""The phases of a step in which gradients are reduced: autograd's hooks in, combined gradients out.

A rank with b_i of B samples weighs its mean gradient with b_i / B; the sum over ranks is then the mean over all B
samples. Weights sum to 1, so gradients that an earlier pass left in p.grad (accumulation) pass through unchanged; those
of local passes are weighted when they come (`local_passes.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from atoll.agent.runtime.step.backward.buckets import Bucket, Separate, Slot, lay_out
from atoll.agent.runtime.step.backward.exchange_times import ExchangeTimes
from atoll.agent.runtime.step.backward.gradient_passes import (
    coalesced,
    refuse_second,
    refuse_sparse,
    scale_into,
    squared_norm,
    total,
)
from atoll.agent.runtime.step.backward.local_passes import LocalPasses
from atoll.agent.runtime.step.measures.clock import marks_of
from atoll.agent.runtime.strategy_interface.capabilities import (
    Norms,
    Pass,
    Reduction,
    RegroupingReducer,
    SeparateReducer,
    SeparateReduction,
    StepEvents,
    TensorReducer,
)
from atoll.errors import PeerLost


class ReducedGradients:
    """Drives a TensorReducer behind the backward pass: `begin`, then gradients come by hooks, then `backward_done` and
    `combined`.

    Buckets leave strictly in order, on every rank the same, whatever order gradients come in. Gradients end up as
    views into the buckets (no copy back); a view is valid until the next backward pass."""

    def __init__(
        self,
        model: nn.Module,
        reducer: TensorReducer,
        events: StepEvents,
        busy: Callable[[bool], None],
        gather: Callable[[Sequence[int]], Sequence[Sequence[int]]],
    ) -> None:
        """busy: told when gradients fill the links, and when nothing of them is under way; on any thread. gather: gives
        what all ranks say, by rank."""
        self._model = model
        self._reducer, self._events, self._busy, self._gather = reducer, events, busy, gather
        self._regrouping = reducer if isinstance(reducer, RegroupingReducer) else None
        self._separating = reducer if isinstance(reducer, SeparateReducer) else None
        self._lay_out()
        self._next = 0  # of the pieces, the first that has not left
        self._under_way: list[tuple[Bucket | Separate, Reduction | SeparateReduction]] = []
        devices = [parameter.device for parameter in model.parameters() if parameter.requires_grad]
        self._gpu = next((device for device in devices if device.type == "cuda"), None)
        # NCCL says that a collective has ended when it has begun.
        quiet = partial(busy, False) if self._gpu is None else _nothing
        self._times = ExchangeTimes(marks_of(self._gpu or torch.device("cpu")), quiet)
        self._weight = self._waited_s = 0.0
        self._part_weight = 1.0  # that p.grad has already where it is this rank's part
        self._sampled = self._local = self._all_have_parts = False
        self._local_sqnorms: list[torch.Tensor | float] = []
        self._sent_bytes = 0
        self._open = self._broken = False
        trained = [one for one in model.parameters() if one.requires_grad]
        self._local_passes = LocalPasses(trained, self._opens)
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._on_parameter)  # type: ignore[no-untyped-call]
            for one in trained
        ]

    def expect_local(self) -> None:
        self._local_passes.expect()

    def begin(self, opened: Pass) -> None:
        self._all_have_parts = self._local_passes.parts
        self._part_weight = opened.batch.weight if self._all_have_parts else 1.0
        self._weight, self._sampled = self._local_passes.begin(opened), opened.sampled
        self._open, self._local = True, opened.local
        if self._local:
            return
        self._local_sqnorms.clear()
        if self._regrouping is not None and self._regrouping.regroup(opened.params):
            self._lay_out()
        self._reducer.begin(opened)
        self._times.begin()
        self._next = 0
        for piece in self._pieces:
            piece.open()

    def backward_done(self) -> None:
        """Parameters without a gradient contribute zeros. Returns when this rank's device is done with the pass: what
        follows is waiting for others."""
        if self._local:
            return
        with torch.no_grad():
            unreached = self._unreached()
            for piece in self._pieces[self._next :]:
                if isinstance(piece, Bucket) and piece.model in unreached:
                    continue
                for slot in piece.slots if isinstance(piece, Bucket) else ():
                    if not slot.came:
                        self._fill_missing(slot)
                self._launch(piece)
        if self._gpu is not None:
            # Of the host's waits in a step the first of two, and the second cannot go: `combined` waits for NCCL's end
            # on the host, for an abort has to be seen before the optimizer's step. NCCL ends after the gradients that
            # it sums, so this wait delays no device. It parts own work from waiting for others: what is waited from
            # here on, for proposals and sums, counts as theirs. Without it both would begin while this device works,
            # and a slow device's own time would be told as waiting.
            torch.cuda.current_stream(self._gpu).synchronize()

    def combined(self) -> Norms:
        """Puts the combined gradients into p.grad and closes the pass. Of a local one p.grad keeps this rank's part."""
        self._open = False
        if self._local:
            return Norms()
        begun_s = time.monotonic()
        sums = [(piece, reduction.wait()) for piece, reduction in self._under_way]
        self._waited_s += time.monotonic() - begun_s
        self._busy(False)
        self._under_way.clear()
        for piece, combined in sums:
            if isinstance(piece, Bucket) and piece.missing:
                self._adopt_missing(piece)
            elif isinstance(piece, Separate) and isinstance(combined, torch.Tensor):
                piece.parameter.grad = combined
        if not self._sampled:
            return Norms()
        alone = [piece.parameter.grad for piece in self._separate if piece.parameter.grad is not None]
        together = [piece.gradients for piece, _ in sums if isinstance(piece, Bucket)]
        norms = [squared_norm(one) for one in (*together, *alone)]
        own = total(self._local_sqnorms) / self._part_weight**2 if self._part_weight > 0 else 0.0
        return Norms(own, total(norms))

    def waited(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def take_times(self) -> tuple[float, float]:
        """Seconds that all reductions of the last pass but the last took, and the last."""
        return self._times.take()

    def sent_bytes(self) -> int:
        """Return the bytes sent since the run began."""
        return self._sent_bytes

    def break_off(self) -> None:
        self._broken = True
        self._under_way.clear()
        self._busy(False)

    def close(self) -> None:
        """Take the hooks off the model again."""
        for hook in self._hooks:
            hook.remove()
        self._local_passes.close()
        self._reducer.close()

    def _lay_out(self) -> None:
        """The pieces that the reducer fuses now."""
        self._pieces = lay_out(self._model, self._reducer)
        self._buckets = [piece for piece in self._pieces if isinstance(piece, Bucket)]
        self._separate = [piece for piece in self._pieces if isinstance(piece, Separate)]
        self._models = 1 + max((bucket.model for bucket in self._buckets), default=0)
        self._places: dict[int, Slot | Separate] = {  # of each parameter, by its id
            **{id(slot.parameter): slot for bucket in self._buckets for slot in bucket.slots},
            **{id(piece.parameter): piece for piece in self._separate},
        }

    def _opens(self) -> None:
        """A gradient comes; the user may have called loss.backward() himself."""
        if not (self._open or self._broken):
            self._events.open_pass()

    @torch.no_grad()
    def _on_parameter(self, parameter: torch.Tensor) -> None:
        self._opens()  # which may lay out the pieces anew
        if self._local or self._broken:
            return
        place, gradient = self._places[id(parameter)], parameter.grad
        assert gradient is not None  # the hook runs after it was accumulated
        refuse_second(place.name, place.came)
        if isinstance(place, Slot):
            refuse_sparse(place.name, gradient)
            self._sample(gradient)
            scale_into(place.view, gradient, self._weight)
            parameter.grad = place.view
            place.bucket.missing -= 1
        else:
            place.gradient = coalesced(gradient)
            self._sample(place.gradient)
        place.came = True
        self._launch_complete()

    def _sample(self, gradient: torch.Tensor) -> None:
        if self._sampled and self._weight > 0:  # a sample at weight 0 says nothing, and may be NaN
            self._local_sqnorms.append(squared_norm(gradient))

    def _launch_complete(self) -> None:
        """Launch the pieces that have all their gradients, in order."""
        try:
            while not self._broken and self._next < len(self._pieces) and self._pieces[self._next].missing == 0:
                self._launch(self._pieces[self._next])
        except PeerLost as error:
            self._events.lost(error)

    def _unreached(self) -> set[int]:
        """Return the models, of several, that the pass reached on no rank.

        Their p.grad is the same on every rank and stays, unless it is parts of local passes."""
        if self._models == 1 or self._all_have_parts:
            return set()
        reached = [0] * self._models
        for bucket in self._buckets:
            reached[bucket.model] |= bucket.missing < len(bucket.slots)
        begun_s = time.monotonic()
        by_rank = self._gather(reached)
        self._waited_s += time.monotonic() - begun_s
        return {place for place, said in enumerate(zip(*by_rank, strict=True)) if not any(said)}

    def _launch(self, piece: Bucket | Separate) -> None:
        self._times.expect()
        self._events.gradients_leave()
        self._busy(True)
        reduction: Reduction | SeparateReduction
        if isinstance(piece, Bucket):
            piece.mark_used()
            used = [slot.came for slot in piece.slots]
            reduction = self._reducer.reduce(piece.flat, used, self._times.launching())
        else:
            assert self._separating is not None  # or there were no such piece
            # Without a gradient of this pass what an earlier one accumulated counts.
            earlier = piece.parameter.grad
            gradient = coalesced(earlier) if earlier is not None and not piece.came else piece.gradient
            ended = self._times.launching()
            reduction = self._separating.reduce_separate(piece.index, gradient, self._weight, ended)
        self._sent_bytes += reduction.sent_bytes
        self._under_way.append((piece, reduction))
        self._next += 1

    def _fill_missing(self, slot: Slot) -> None:
        earlier = slot.parameter.grad
        if earlier is None:
            slot.view.zero_()
        else:  # accumulated by an earlier pass; of a local one others may have none
            scale_into(slot.view, earlier, self._weight)
            slot.parameter.grad = slot.view
            slot.came = True
            slot.bucket.missing -= 1

    @staticmethod
    def _adopt_missing(bucket: Bucket) -> None:
        """Give p.grad to parameters that another rank used. If no rank did, it stays None: optimizers skip those."""
        for slot in bucket.slots:
            if not slot.came and slot.parameter.grad is None and slot.used.item() > 0:
                slot.parameter.grad = slot.view


def _nothing() -> None: ...
