"""The calls of a script that all ranks make together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from atoll.agent.runtime.channel.agreement import Meeting
from atoll.agent.runtime.data.evaluation import gathered, gathered_parts
from atoll.agent.runtime.membership.transition.view_transition import ViewTransition
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.step.backward.gathered_features import GatheredFeatures
from atoll.agent.runtime.step.drivers.step_driver import CurrentView
from atoll.agent.runtime.step.peer_loss import PeerLossHandler
from atoll.agent.runtime.step.state.state_keeper import StateKeeper
from atoll.errors import BadInput


class CollectiveCalls:
    """Used on the training thread alone."""

    def __init__(
        self,
        session: Session,
        current: CurrentView,
        succession: ViewTransition,
        *,
        state: StateKeeper,
        losses: PeerLossHandler,
    ) -> None:
        self._session, self._current = session, current
        driver = current.driver
        self._loader, self._passes, self.model = driver.parts.loader, driver.parts.passes, driver.parts.evaluated
        self._succession, self._state = succession, state
        self._losses = losses
        self.epochs = 0  # that the script trains in all, as far as it said
        self.training_ended = False
        """All ranks have the same model, and may end: no call waits for others but those that need their numbers."""

    def synchronize(self) -> None:
        """Bring everything that was not sent yet into the weights. Call it between two steps."""
        if self._passes.open or self._passes.gradients_pending:
            raise BadInput(
                "run.synchronize between run.backward and optimizer.step(); call it after the step. A script that "
                "accumulates gradients has to step at its epoch's last batch too: `if ... or run.last_batch:`"
            )
        self.model.refuse_training("run.synchronize")
        self._succession.abandon("run.synchronize needs all ranks")
        if not self.training_ended:
            self._state.change_begins()
            with self._losses.leaves_if_lost():
                self._current.driver.flush(Meeting.SYNCHRONIZE)
            torch.clear_autocast_cache()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model is the one that a checkpoint of this moment holds, the same on every rank; behind the last
        batch of the last epoch the one that training ends with. Training continues afterwards as if nothing had been.
        Inside another one it does nothing."""
        if self.model.is_shown or self.training_ended or self._session.joins:
            yield
            return
        if self._passes.open:
            raise BadInput("run.evaluation in the middle of a backward pass; call it before run.backward or after it")
        if self._state.snapshot.part is not None:
            raise BadInput(
                "an evaluation needs the whole model, and each worker has a stage of it. Evaluate a checkpoint: "
                "`atoll export`, in a script of its own"
            )
        with ExitStack() as shown:
            with self._losses.leaves_if_lost():
                self._meet(Meeting.EVALUATION)
                self._state.change_begins()
                if self._loader.position.epoch + 1 >= self.epochs and not self._loader.batches_left:
                    self._current.driver.flush(Meeting.END)  # no training follows: this is the last model
                shown.enter_context(self.model.shown(self._current.driver, self._session.group))
            link = self._session.link
            samples = link.trains(0) if link is not None else 0
            yield
            if link is not None:
                link.trains(samples)

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Each of these numbers added up over the ranks."""
        with self._losses.leaves_if_lost():
            self._meet(Meeting.SUM)
            return tuple(numbers if (group := self._session.group) is None else group.sum_numbers(numbers))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks."""
        with self._losses.leaves_if_lost():
            self._meet(Meeting.GATHER)
            return gathered(self._session.group, tensor)

    def total_count(self, count: float) -> float:
        """Return the sum of the ranks' counts for a pass that begins. A rank that is lost counts nothing."""
        group, total = self._session.group, count
        if group is not None and not self._passes.broken:
            with self._losses.aborts_if_lost():
                self._current.driver.meet(Meeting.WEIGHT)
                (total,) = group.sum_numbers([count])
        return total

    def gather_for_loss(self, own: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return all ranks' rows, with gradients, and the place of this rank's first. Call it in a forward pass."""
        batch, group = self._loader.current, self._session.group
        if batch is None:
            raise BadInput("run.gather_for_loss outside the loop over the loader: there is no batch that is trained")
        counts = batch.weight > 0  # else what it has is an empty slice's, for show
        rank, parts = 0, [own.detach() if counts else own.detach()[:0]]
        if group is not None and not self._passes.broken:
            with self._losses.aborts_if_lost():
                rank, parts = group.rank, gathered_parts(group, parts[0])
        of_all = sum(map(len, parts))
        first = sum(map(len, parts[:rank])) if counts else of_all
        everyone = torch.cat(parts if counts else [*parts, own.detach()])
        gathered_rows: torch.Tensor = GatheredFeatures.apply(own, everyone, first, partial(self._summed, of_all))  # type: ignore[no-untyped-call]
        return gathered_rows, first

    def _summed(self, of_all: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the whole batch's loss by the rows of all ranks, in a backward pass.

        It is divided by the weight of this rank's pass, which multiplies it later. Rows behind the first `of_all` count
        for nothing."""
        group, driver = self._session.group, self._current.driver
        weight, scale = driver.weight, driver.parts.events.loss_scale()
        if group is None or self._passes.broken:
            return gradient
        wide = gradient.detach().to("cpu", torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        whole = wide[:of_all] * (weight / scale) if weight > 0 else torch.zeros_like(wide[:of_all])  # 0 * NaN is NaN
        with self._losses.aborts_if_lost():
            group.sum_in_place(whole, "summing gradients of gathered rows")
        factor = scale / weight if weight > 0 else 0.0
        return torch.cat([whole * factor, torch.zeros_like(wide[of_all:])]).to(gradient.device)

    def _meet(self, meeting: Meeting) -> None:
        self._succession.abandon(f"{meeting} needs all ranks")
        if not self.training_ended:
            self._current.driver.meet(meeting)
