"""Strategy `groups`' worker half: an Engine whose step is a round of local updates and averages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from atoll.agent.runtime.api.engine_inputs import pair_of
from atoll.agent.runtime.data.sampler import BatchSlice, EpochOrder
from atoll.agent.runtime.pipeline.clipping import clip_over_stages
from atoll.agent.runtime.pipeline.executor import MicroBatch, StageExecutor
from atoll.agent.runtime.pipeline.wire import StageLinks
from atoll.agent.runtime.step.capabilities import EngineParts, WorkerContext, WorkerHalf
from atoll.errors import BadInput
from atoll.strategies.groups.averaging import MAX_MEMBERS, Average, Averaging, Grouped
from atoll.strategies.groups.incoming import Incoming
from atoll.strategies.groups.mailbox import END_OF_ROUND, START_OF_RUN
from atoll.strategies.groups.messages import GroupsMessage
from atoll.strategies.groups.replica_state import ReplicaState
from atoll.strategies.groups.settings import Groups
from atoll.strategies.groups.signals import Signals


def build(context: WorkerContext) -> WorkerHalf:
    parts = context.engine_parts
    if parts is None:
        raise BadInput("strategy groups makes the updates itself: call run.prepare_pipeline in place of run.prepare")
    if parts.place.pipelines > MAX_MEMBERS:
        raise BadInput(f"strategy groups takes at most {MAX_MEMBERS} replicas")
    engine = RoundEngine(context, parts)
    return WorkerHalf(engine, measures=engine)


class RoundEngine:
    """An Engine and its Measures. A round's batches are claimed one by one by whichever pipeline is free, each once;
    one that finds none is done. Then the replicas of each stage average, weighted by what each trained in the round,
    and are equal to the bit. A pipeline of one stage is a worker with the whole model."""

    def __init__(self, context: WorkerContext, parts: EngineParts) -> None:
        assert isinstance(context.settings, Groups)
        session = context.session
        self._session, self._parts, self._channel = session, parts, context.channel
        (self._optimizer,) = context.optimizers
        self._model, self._place = context.model, parts.place
        self._order = EpochOrder(len(parts.dataset), session.seed, parts.shuffle)  # type: ignore[arg-type]
        self._state = ReplicaState(context.model, self._optimizer)
        self._signals = Signals(context.scheduler)
        self._averaging = Averaging(
            session.place.rank,
            context.channel.send,
            self._state.size + 1,  # at a round's end also its loss
            session.collective_timeout_s,
        )
        self._links = StageLinks(parts.place, context.channel.send, session.collective_timeout_s)
        self._executor = StageExecutor(context.model, parts.loss, self._links, session.device, session.throttle)
        self._begun: list[torch.Tensor] = []  # the state as the round began
        self._round = 0
        self._wait_s, self._trained, self._samples = 0.0, 0, 1  # of the round
        self._passes_s = self._idle_s = 0.0  # of the round: of its batches, and for other stages within
        self._passes_before_s = self._idle_before_s = 0.0  # of all rounds before
        self._sizes: list[int] = []  # of the groups that it averaged with

    def start(self) -> None:
        self._state.prepare()  # a checkpoint of another strategy has not all of it
        if self._session.group is not None:
            self._channel.all_connected()
            self._channel.connect_receiver(Incoming(self._averaging.mailbox, self._links.mailbox), ())
        if self._parts.part is not None:
            self._take_first_pipelines()

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """A round. batch: not looked at, for who trains which samples is decided on the way. Returns the mean loss over
        the whole round's samples, [], the same on every rank."""
        self._begun = self._state.copy()
        self._round, self._samples = taken.step, taken.total
        self._wait_s, self._trained, self._sizes = 0.0, 0, []
        self._passes_before_s += self._passes_s
        self._idle_before_s += self._idle_s
        self._passes_s = self._idle_s = 0.0
        self._averaging.mailbox.begin(taken.step)
        self._links.begin(taken.step)
        self._signals.begin(taken.step)
        loss_sum, since_average = 0.0, 0
        while (indices := self._next_batch(taken)) is not None:
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
        replicas = self._place.pipelines
        return {
            "samples_share": self._trained / self._samples,
            "group_share": sum(self._sizes) / (len(self._sizes) * replicas) if self._sizes else 0.0,
            "wait_s": self._wait_s,
            "bubble_share": self._idle_s / self._passes_s if self._passes_s else 0.0,
            "sent_bytes": sent_bytes,
        }

    def statistics(self) -> Mapping[str, float]:
        passes_s, idle_s = self._passes_before_s + self._passes_s, self._idle_before_s + self._idle_s
        return {"bubble_share": idle_s / passes_s if passes_s else 0.0}

    def _take_first_pipelines(self) -> None:
        """All replicas of a stage become the first pipeline's: models may have been made unlike."""
        ranks = self._place.replicas
        weight = 1.0 if self._place.pipeline == 0 else 0.0
        self._averaged_over(Grouped(0, START_OF_RUN, dict.fromkeys(ranks, 0)), weight)

    def _next_batch(self, taken: BatchSlice) -> list[int] | None:
        """The next batch of the round that no pipeline has: its samples' indices. None where none is left."""
        size = self._parts.batch_size
        begun_s, idle_s = time.monotonic(), self._links.waited_s
        self._session.throttle.pay()
        number = self._links.agree_on_batch(lambda: self._claim(taken))
        self._session.throttle.resume()
        if number is None:
            return None
        self._passes_s += time.monotonic() - begun_s
        self._idle_s += self._links.waited_s - idle_s
        begin = taken.start + number * size
        return self._order.indices(taken.epoch, begin, min(begin + size, taken.start + taken.total))

    def _claim(self, taken: BatchSlice) -> int | None:
        group, size = self._session.group, self._parts.batch_size
        number = group.claim(f"batch of round {taken.step}") if group is not None else self._trained // size
        return number if number * size < taken.total else None

    def _update(self, indices: list[int]) -> float:
        """One local update. Returns the mean loss; 0 where another stage knows it."""
        parts = self._parts
        size = math.ceil(len(indices) / parts.micro_batches)
        micros = [indices[at : at + size] for at in range(0, len(indices), size)]
        self._optimizer.zero_grad()
        begun_s, idle_s = time.monotonic(), self._links.waited_s
        loss = self._executor.run([MicroBatch(len(one) / len(indices), partial(self._fetched, one)) for one in micros])
        if parts.clip_norm is not None:
            clip_over_stages(self._model.parameters(), parts.clip_norm, self._links)
        self._optimizer.step()
        self._session.throttle.pay()
        self._passes_s += time.monotonic() - begun_s
        self._idle_s += self._links.waited_s - idle_s
        return loss

    def _fetched(self, indices: list[int]) -> tuple[Any, Any]:
        parts = self._parts
        return pair_of(parts.collate_fn([parts.dataset[one] for one in indices]), self._session.device)

    def _average_if_grouped(self, samples: int) -> bool:
        """After a local update. samples: trained since this replica last averaged. Returns whether it did now."""
        if self._place.pipelines == 1:
            return False
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
        """The replicas of each stage average, weighted by what they trained in the round. Returns the loss of the whole
        round."""
        self._session.throttle.pay()
        begun_s = time.monotonic()
        if self._place.pipelines > 1:
            group = Grouped(self._round, END_OF_ROUND, dict.fromkeys(self._place.replicas, 0))
            loss = self._averaged_over(group, float(self._trained), loss)
        loss = self._links.last_stages(loss)
        self._wait_s += time.monotonic() - begun_s
        self._session.throttle.resume()
        return loss

    def _averaged_over(self, group: Grouped, weight: float, number: float = 0.0) -> float:
        """Average with a group that nobody may decline. Returns the average of the number."""
        state_N = np.append(self._state.read(), np.float32(number))
        averaged = self._averaging.average(group, state_N, weight)
        if averaged is None:
            return number  # alone
        self._state.write(averaged.state_N[:-1], averaged.replicas)
        return float(averaged.state_N[-1])
