"""Everything that wraps an optimizer's step(), in order. Each optimizer has one pre hook and one post hook, from here.

| order | step | effect |
|---|---|---|
| 0 | `_refuse_other`, torch's global pre hook | refuses optimizers that run.prepare was not given |
| 1 | aborted step | after a loss, step() runs over no parameters; steps 2 to 8 are left out |
|   | divided step | in all passes of a batch but the last the same; steps 2 to 8 and 10 to 13 are left out |
| 2 | `_refuse_shown` | refuses an update while the model is evaluated |
| 3 | `_refuse_carried` | refuses gradients that were carried over a boundary (several optimizers) |
| 4 | `refuse_unsent` | refuses gradients of run.no_sync alone |
| 5 | `_begin_change` | waits until checkpoints have read the state |
| 6 | `_scale_rate` | multiplies learning rates by the plan's factor |
| 7 | `_begin_update` | the driver waits for what the update needs; a loss here aborts the step |
| 8 | `unsent.add_to` | adds gradients that an earlier strategy left unsent |
| 8 | `_look_at_gradients` | counts gradients that are not finite |
| – | torch's own update | |
| 9 | learning rates | put back, before every other post hook: a scheduler in one must see the script's rates |
| 10 | `_mark_applied` | the gradients are applied, and the state differs from the last checkpoint |
| 11 | `_pay_throttle` | stretches the update of a worker that is slowed down on purpose |
| 12 | `_end_update` | the driver counts and sends the update; a dry run undoes it |
| 13 | `_forget_casts` | clears autocast's cache, and marks the end of the update for the clock |

A torch.amp.GradScaler that leaves an update out calls none of them: `scaled_steps.py` calls `left_out` then, which runs
the steps 1 to 7 and 9 to 13, because other ranks wait for this one's part of the update."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from atoll.agent.runtime.membership.aborted_step import without_gradients
from atoll.agent.runtime.membership.member_state import MemberState
from atoll.agent.runtime.step.backward.unapplied_gradients import UnappliedGradients
from atoll.agent.runtime.step.drivers.step_driver import CurrentView
from atoll.agent.runtime.step.measures.non_finite import NonFinite
from atoll.agent.runtime.step.optimizers.scaled_steps import ScaledSteps
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.errors import AtollError, BadInput, DeadlineExceeded, PeerLost

Before = Callable[[torch.optim.Optimizer, Any, Any], Any]
After = Callable[[torch.optim.Optimizer, Any, Any], None]


def register_first(optimizer: torch.optim.Optimizer, before: Before, after: After) -> list[RemovableHandle]:
    """Register one pre hook, and one post hook that runs before every other."""
    ends = optimizer.register_step_post_hook(after)
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(ends.id, last=False)
    return [optimizer.register_step_pre_hook(before), ends]


class LearningRate:
    """Factor that holds while optimizer.step() runs. The script, its schedulers and checkpoints see their own rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # group, its own rate, the one in its place

    def multiply(self, factor: float) -> None:
        """Multiply every group's rate, a number or a tensor, until `restore`. A group may have none."""
        self.restore()  # of a step that raised
        if factor == 1:
            return
        for group in self._optimizer.param_groups:
            if "lr" in group:
                own = group["lr"]
                group["lr"] = scaled = own * factor
                self._scaled.append((group, own, scaled))

    def restore(self) -> None:
        """Put back the very objects that were there, unless the script has set another rate since."""
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:
                group["lr"] = own
        self._scaled.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParts:
    """The parts of a training that take part in an update."""

    state: StateKeeper
    member: MemberState
    carried: UnappliedGradients
    non_finite: NonFinite
    scaled: ScaledSteps


class UpdateHooks:
    """Used by the training thread alone."""

    def __init__(
        self,
        current: CurrentView,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        parts: UpdateParts,
    ) -> None:
        self._current, self._parts, self._step = current, parts, current.driver.parts
        self._passes = self._step.passes
        self._rates = {id(optimizer): LearningRate(optimizer) for optimizer in optimizers}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._before = (
            self._refuse_shown,
            self._refuse_carried,
            self._refuse_unsent_update,
            self._begin_change,
            self._scale_rate,
            self._begin_update,
        )
        self._after = (self._mark_applied, self._pay_throttle, self._end_update, self._forget_casts)
        self._handles = [register_optimizer_step_pre_hook(self._refuse_other)]
        for optimizer in optimizers:
            self._handles += register_first(optimizer, self._step_begins, self._step_ends)

    def at_boundary(self) -> None:
        """Undo what a step() that raised has left: torch calls no post hook then."""
        for rate in self._rates.values():
            rate.restore()

    def left_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an update that moves nothing: a GradScaler found an overflow, and others wait for this rank's part."""
        if self._run_before(optimizer):
            self._rates[id(optimizer)].restore()
        self._run_after(optimizer)

    def refuse_unsent(self, what: str) -> None:
        """Raise BadInput if p.grad has what only this worker knows."""
        if self._passes.unsent:
            raise BadInput(
                f"{what} on gradients that only this worker has: the last backward pass was under run.no_sync(). Make "
                "the last one of an accumulation outside of it, also where run.last_batch ends one early"
            )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- the two hooks

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of step(), where they are others."""
        if self._is_partial:
            return self._step.divided.in_place_of(optimizer, args, kwargs)
        if not self._run_before(optimizer):
            aborted = self._parts.member.aborted
            assert aborted is not None
            return aborted.in_place_of(optimizer, args, kwargs)
        if not self._passes.muted:
            self._parts.state.unsent.add_to(optimizer)
        self._look_at_gradients(optimizer)
        if len(args) == 1 and not kwargs:  # no closure
            return None
        return without_gradients(optimizer, args, kwargs, when=lambda: self._parts.member.aborted is not None)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._parts.scaled.stepped = True
        self._rates[id(optimizer)].restore()
        if self._parts.member.aborted is None:
            self._parts.state.unsent.applied()
        self._run_after(optimizer)

    def _run_before(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return False if the step is aborted, before or now."""
        if self._parts.member.aborted is None:
            for step in self._before:
                step(optimizer)
        return self._parts.member.aborted is None

    def _run_after(self, optimizer: torch.optim.Optimizer) -> None:
        if (aborted := self._parts.member.aborted) is not None:
            aborted.updated, self._passes.gradients_pending = True, False
            return
        if self._is_partial:
            self._step.divided.updated()
            return
        for step in self._after:
            step(optimizer)

    @property
    def _is_partial(self) -> bool:
        return self._step.divided.partial and self._parts.member.aborted is None

    # --- before the update

    def _refuse_other(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise BadInput: ranks would not move parameters alike, and no checkpoint would have the moments.

        Inside a prepared optimizer's step(), as wrappers call them, others may step."""
        if id(optimizer) in self._rates:
            return
        moved = (id(one) for group in optimizer.param_groups for one in group["params"])
        name = next((self._names[one] for one in moved if one in self._names), None)
        if name is not None and not self._is_inside_prepared():
            raise BadInput(
                f"a {type(optimizer).__name__} that run.prepare was not given is about to move parameter {name}: "
                "its moments would be in no checkpoint. Give it to run.prepare, and use what that returned"
            )

    def _is_inside_prepared(self) -> bool:
        """Return True if a prepared optimizer's step() is the caller.

        The stack knows it also after a step() that raised: torch calls no post hook then, and a flag would stay set."""
        frame = inspect.currentframe()
        while frame is not None:
            if id(frame.f_locals.get("self")) in self._rates:
                return True
            frame = frame.f_back
        return False

    def _refuse_shown(self, _: torch.optim.Optimizer) -> None:
        if self._step.evaluated.is_shown:
            self._step.evaluated.refuse_training("optimizer.step()")

    def _refuse_carried(self, optimizer: torch.optim.Optimizer) -> None:
        if self._parts.carried.watches:
            self._parts.carried.check(optimizer)

    def _refuse_unsent_update(self, _: torch.optim.Optimizer) -> None:
        self.refuse_unsent("optimizer.step()")

    def _begin_change(self, _: torch.optim.Optimizer) -> None:
        self._parts.state.update_begins()

    def _scale_rate(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates[id(optimizer)].multiply(self._passes.learning_rate_factor)

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._passes.muted:
            return
        try:
            self._current.driver.before_update()
        except AtollError as error:
            self._rates[id(optimizer)].restore()
            if not isinstance(error, PeerLost | DeadlineExceeded):
                raise
            self._step.events.lost(error)

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        scaled = getattr(optimizer, "grad_scale", None) is not None  # a GradScaler sees to overflows itself
        if not (scaled or self._passes.muted):
            self._parts.non_finite.gradients(optimizer)

    # --- after it

    def _mark_applied(self, optimizer: torch.optim.Optimizer) -> None:
        if self._parts.carried.watches:
            self._parts.carried.applied(optimizer)
        self._passes.gradients_pending = False
        self._parts.state.shutdown.updated = True

    def _pay_throttle(self, _: torch.optim.Optimizer) -> None:
        self._step.clock.pay()

    def _end_update(self, _: torch.optim.Optimizer) -> None:
        if self._passes.muted:
            self._step.dry_run.undo_update()
        else:
            self._current.driver.after_update()

    def _forget_casts(self, _: torch.optim.Optimizer) -> None:
        torch.clear_autocast_cache()  # the script's region may be around several updates
        self._step.clock.updated()
