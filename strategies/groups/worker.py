"""Strategy `groups`' worker half: an Engine whose step is a round of local updates and averages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from atoll.agent.runtime.data.sampler import BatchSlice, EpochOrder
from atoll.agent.runtime.step.capabilities import EngineParts, WorkerContext, WorkerHalf
from atoll.errors import BadInput
from atoll.strategies.groups.averaging import MAX_MEMBERS, Average, Averaging, Grouped
from atoll.strategies.groups.mailbox import END_OF_ROUND
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.replica_state import ReplicaState
from atoll.strategies.groups.settings import Groups
from atoll.strategies.groups.signals import Signals


def build(context: WorkerContext) -> WorkerHalf:
    if context.engine_parts is None:
        raise BadInput("strategy groups makes the updates itself: call run.prepare_pipeline in place of run.prepare")
    if context.session.place.world_size > MAX_MEMBERS:
        raise BadInput(f"strategy groups takes at most {MAX_MEMBERS} replicas")
    engine = RoundEngine(context, context.engine_parts)
    return WorkerHalf(engine, measures=engine)


class RoundEngine:
    """An Engine and its Measures. A round's batches are claimed one by one by whoever is free, each once; a replica
    that finds none is done. Then all average, weighted by what each trained in the round, and are equal to the bit."""

    def __init__(self, context: WorkerContext, parts: EngineParts) -> None:
        assert isinstance(context.settings, Groups)
        session = context.session
        self._session, self._parts, self._channel = session, parts, context.channel
        (self._optimizer,) = context.optimizers
        self._model = context.model
        self._order = EpochOrder(len(parts.dataset), session.seed, parts.shuffle)  # type: ignore[arg-type]
        self._state = ReplicaState(context.model, self._optimizer)
        self._signals = Signals(context.scheduler)
        self._averaging = Averaging(
            session.place.rank,
            context.channel.send,
            self._state.size + 1,  # at a round's end also its loss
            session.collective_timeout_s,
        )
        self._begun: list[torch.Tensor] = []  # the state as the round began
        self._round = 0
        self._wait_s, self._trained, self._samples = 0.0, 0, 1  # of the round
        self._sizes: list[int] = []  # of the groups that it averaged with

    def start(self) -> None:
        self._state.prepare()  # a checkpoint of another strategy has not all of it
        if self._session.group is not None:
            self._channel.all_connected()
            self._channel.connect_receiver(self._averaging.mailbox, ())

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """A round. batch: not looked at, for who trains which samples is decided on the way. Returns the mean loss over
        the whole round's samples, [], the same on every rank."""
        self._begun = self._state.copy()
        self._round, self._samples = taken.step, taken.total
        self._wait_s, self._trained, self._sizes = 0.0, 0, []
        self._averaging.mailbox.begin(taken.step)
        self._signals.begin(taken.step)
        loss_sum, since_average = 0.0, 0
        while (indices := self._claim(taken)) is not None:
            loss_sum += self._update(indices) * len(indices)
            self._trained += len(indices)
            since_average += len(indices)
            if self._average_if_grouped(since_average):
                since_average = 0
        self._signals.done()
        loss = self._end_round(loss_sum / max(self._trained, 1))
        return torch.tensor(loss)

    def rewind(self) -> bool:
        self._state.restore(self._begun)
        return True

    def close(self) -> None:
        self._state.close()

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        replicas = self._session.place.world_size
        return {
            "samples_share": self._trained / self._samples,
            "group_share": sum(self._sizes) / (len(self._sizes) * replicas) if self._sizes else 0.0,
            "wait_s": self._wait_s,
            "sent_bytes": sent_bytes,
        }

    def statistics(self) -> Mapping[str, float]:
        return {}

    def _claim(self, taken: BatchSlice) -> list[int] | None:
        """The next batch of the round that nobody has: its samples' indices. None where none is left."""
        group = self._session.group
        size = self._parts.batch_size
        number = group.claim(f"batch of round {taken.step}") if group is not None else self._trained // size
        begin = taken.start + number * size
        end = min(begin + size, taken.start + taken.total)
        return self._order.indices(taken.epoch, begin, end) if begin < end else None

    def _update(self, indices: list[int]) -> float:
        """One local update. Returns the mean loss."""
        parts, loss_sum = self._parts, 0.0
        size = math.ceil(len(indices) / parts.micro_batches)
        self._optimizer.zero_grad()
        for at in range(0, len(indices), size):
            micro = indices[at : at + size]
            inputs, targets = _moved(parts.collate_fn([parts.dataset[one] for one in micro]), self._session.device)
            loss = parts.loss(self._model(inputs), targets)
            if loss.numel() != 1:
                raise BadInput(
                    f"the loss has shape {tuple(loss.shape)}; it must be one number: the mean over the batch"
                )
            (loss * (len(micro) / len(indices))).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item() * len(micro)
        self._optimizer.step()
        return loss_sum / len(indices)

    def _average_if_grouped(self, samples: int) -> bool:
        """After a local update. samples: trained since this replica last averaged. Returns whether it did now."""
        self._session.throttle.pay()
        begun_s = time.monotonic()
        answer = self._signals.ready(self._averaging.mailbox.ended)
        averaged = self._averaged(answer, samples) if answer is not None else None
        self._averaging.mailbox.pass_by(self._signals.newest)
        self._sizes.append(1 if averaged is None else len(averaged.members))
        self._wait_s += time.monotonic() - begun_s
        self._session.throttle.resume()  # all this was no computing
        return averaged is not None

    def _averaged(self, answer: GroupsMessage, samples: int) -> Average | None:
        if len(answer.members) == 1:
            return None
        state_N = np.append(self._state.read(), np.float32(0))
        group = Grouped(self._round, answer.group, dict(zip(answer.members, answer.signals, strict=True)))
        averaged = self._averaging.average(group, state_N, float(samples))
        if averaged is not None:
            self._state.write(averaged.state_N[:-1], averaged.replicas)
            self._averaging.mailbox.averaged(self._signals.newest, answer.group)
        return averaged

    def _end_round(self, loss: float) -> float:
        """All average, weighted by what they trained in the round. Returns the loss of the whole round."""
        ranks = range(self._session.place.world_size)
        if len(ranks) == 1:
            return loss
        self._session.throttle.pay()
        begun_s = time.monotonic()
        state_N = np.append(self._state.read(), np.float32(loss))
        group = Grouped(self._round, END_OF_ROUND, dict.fromkeys(ranks, 0))
        averaged = self._averaging.average(group, state_N, float(self._trained))
        assert averaged is not None  # nobody may decline
        self._state.write(averaged.state_N[:-1], averaged.replicas)
        self._wait_s += time.monotonic() - begun_s
        self._session.throttle.resume()
        return float(averaged.state_N[-1])


def _moved(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """(inputs, targets) on the device. Raises BadInput for a batch that is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BadInput(
            "run.prepare_pipeline trains on pairs: dataset or collate_fn have to give (inputs, targets), and gave a "
            f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        )
    inputs, targets = (one.to(device) if isinstance(one, torch.Tensor) else one for one in batch)
    return inputs, targets
