"""Strategy `groups`' worker half: an Engine whose step is a round of local updates and averages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from atoll.agent.runtime.api.engine_inputs import pair_of
from atoll.agent.runtime.data.loader import sample_count
from atoll.agent.runtime.data.orders import EpochOrder, Generators, mixed_seed
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.pipeline.executor import MicroBatch, StageExecutor, clip_over_stages
from atoll.agent.runtime.pipeline.wire import FIRST_PURPOSE, StageLinks, StageMailbox
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts, WorkerContext, WorkerHalf
from atoll.errors import PeerLost
from atoll.strategies.groups.averaging import F32, Average, Averaging, Grouped, distance
from atoll.strategies.groups.claims import CLAIM, Claims
from atoll.strategies.groups.ledger import Answer, Say
from atoll.strategies.groups.mailbox import ROUND_ENDS, START_OF_RUN, PartMailbox
from atoll.strategies.groups.replica_state import ReplicaState
from atoll.strategies.groups.settings import Groups
from atoll.strategies.groups.signals import Signals


def build(context: WorkerContext) -> WorkerHalf:
    assert context.engine_parts is not None  # or check_script had refused it
    engine = RoundEngine(context, context.engine_parts)
    return WorkerHalf(engine, measures=engine)


@dataclass(frozen=True, slots=True)
class LocalAverage:
    """averaged: None where nobody else took part. state_N: of this replica, as it was in it."""

    averaged: Average | None
    state_N: F32


class Incoming:
    """A FrameReceiver that routes frames to the averages' mailbox, to the claims, or to the pipeline's."""

    def __init__(self, parts: PartMailbox, claims: Claims, signals: Signals, stages: StageMailbox) -> None:
        self._parts, self._claims, self._signals, self._stages = parts, claims, signals, stages

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        first = payload[0] if len(payload) else 0
        if first == CLAIM:
            return self._claims.deliver(origin, step, payload)
        receiver = self._stages if first >= FIRST_PURPOSE else self._parts
        return receiver.deliver(kind, origin, step, tensor, count, payload)

    def fail(self, reason: str) -> None:
        for one in (self._parts, self._claims, self._signals, self._stages):
            one.fail(reason)


class RoundEngine:
    """An Engine and its Measures. A round's batches are claimed one by one by whichever pipeline is free, each once;
    one that finds none is done. Then the replicas of each stage average, weighted by what each trained in the round,
    and are equal to the bit. After a local update the replica averages with its group on a thread of its own, while
    this one makes the passes of the next batch; before the next update the average is in. So a gradient may be of
    weights that are one average older than those that it changes, as in AD-PSGD. A pipeline of one stage is a worker
    with the whole model; where one is lost in a round, the others make the round without it. Of several stages they
    begin it again: each stage had averages of its own with the lost pipeline, so no batch of that is known to be in
    all stages, or in none."""

    def __init__(self, context: WorkerContext, parts: EngineParts) -> None:
        assert isinstance(context.settings, Groups)
        session = context.session
        self._session, self._parts, self._channel = session, parts, context.channel
        (self._optimizer,) = context.optimizers
        self._model, self._place = context.model, parts.place
        self._order = EpochOrder(lambda: sample_count(parts.dataset), session.seed, parts.shuffle)
        self._state = ReplicaState(context.model, self._optimizer)
        self._signals = Signals(
            context.scheduler, session.view, parts.place, context.channel.abort, session.collective_timeout_s
        )
        in_step = not context.settings.overlaps
        self._claims = Claims(parts.place, context.channel.send, session.collective_timeout_s, in_step=in_step)
        self._averaging = Averaging(
            session.place.rank,
            context.channel.send,
            self._state.size + 1,  # at a round's end also its loss
            session.collective_timeout_s,
        )
        islands = {one.rank: one.island for one in session.members}
        self._links = StageLinks(
            parts.place,
            context.channel.send,
            session.collective_timeout_s,
            form=context.settings.thin_links,
            thin=[one for one in parts.place.mates if islands.get(one) != islands.get(parts.place.rank)],
        )
        self._executor = StageExecutor(context.model, parts.loss, self._links, session.device, session.throttle)
        self._begun: list[torch.Tensor] = []  # the state as this round began: the last that has
        self._begun_round = -1
        self._taken: BatchSlice | None = None  # this round
        self._round, self._batches = 0, 0  # bits of the round's batches that are in the state
        self._lost: str | None = None
        self._overlaps = context.settings.overlaps and parts.place.pipelines > 1
        self._averager = ThreadPoolExecutor(1, thread_name_prefix="averaging")
        self._under_way: Future[LocalAverage | None] | None = None
        self._wait_s, self._trained, self._samples = 0.0, 0, 1  # of the round
        self._since_average = 0  # samples
        self._passes_s = self._idle_s = 0.0  # of the round: of its batches, and for other stages within
        self._passes_before_s = self._idle_before_s = 0.0  # of all rounds before
        self._sizes: list[int] = []  # of the groups that it averaged with
        self._averaged_s, self._unaveraged_s = 0.0, 0.0  # when it did last, and the longest of the round
        self._disagreement = 0.0

    @property
    def why_not_in_place(self) -> str | None:
        return None

    @property
    def tolerates_loss_mid_step(self) -> bool:
        return self._place.stages == 1  # a pipeline is not whole without one of its stages

    @property
    def lost(self) -> str | None:
        return self._lost

    def start(self) -> None:
        self._state.prepare()  # a checkpoint of another strategy has not all of it
        if self._session.group is not None:
            self._channel.all_connected()
            mailboxes = Incoming(self._averaging.mailbox, self._claims, self._signals, self._links.mailbox)
            self._channel.connect_receiver(mailboxes, (), self._goes_on)
        if self._parts.part is not None or self._session.view > 1:
            self._take_first_pipelines()

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """A round. batch: not looked at, for who trains which samples is decided on the way. Returns the mean loss over
        the whole round's samples, [], the same on every rank."""
        try:
            return self._train_round(taken)
        except BaseException:
            self._break_off()
            raise

    def _train_round(self, taken: BatchSlice) -> torch.Tensor:
        self._taken, self._round, self._samples, self._batches = taken, taken.step, taken.total, 0
        batches = math.ceil(taken.total / self._parts.batch_size)
        self._wait_s, self._trained, self._sizes = 0.0, 0, []
        self._averaged_s, self._unaveraged_s = time.monotonic(), 0.0
        self._passes_before_s += self._passes_s
        self._idle_before_s += self._idle_s
        self._passes_s = self._idle_s = 0.0
        self._averaging.mailbox.begin(taken.step)
        self._links.begin(taken.step)
        self._signals.begin(taken.step)
        self._claims.begin(taken.step, batches)
        loss_sum, self._since_average = 0.0, 0
        while True:
            claimed = self._next_batch(batches)
            if self._begun_round != taken.step:  # not before: now all pipelines have made the round before whole
                self._begun = self._state.copy() if self._place.pipelines > 1 else []  # alone it cannot go on
                self._begun_round = taken.step
            if claimed.say is Say.BATCH:
                indices = self._indices(claimed.batch)
                loss_sum += self._update(indices) * len(indices)
                self._batches |= 1 << claimed.batch
                self._trained += len(indices)
                self._since_average += len(indices)
                self._say_ready()
                continue
            self._train_no_more()
            loss = self._end_round(claimed.members, loss_sum / max(self._trained, 1))
            if self._batches == (1 << batches) - 1:  # else a member was lost with some of them
                return torch.tensor(loss)

    def rewind(self, step: int) -> bool:
        if self._begun_round != step:
            return self._round == step  # nothing has changed in it
        if not self._begun:
            return False
        self._state.restore(self._begun)
        return True

    def close(self, *, followed: bool = False) -> None:
        self._break_off()
        self._averager.shutdown()
        self._state.close()

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        replicas = self._place.pipelines
        return {
            "samples_share": self._trained / self._samples,
            "group_share": sum(self._sizes) / (len(self._sizes) * replicas) if self._sizes else 0.0,
            "wait_s": self._wait_s,
            "bubble_share": self._idle_s / self._passes_s if self._passes_s else 0.0,
            "unaveraged_s": self._unaveraged_s,
            "disagreement": self._disagreement,
            "sent_bytes": sent_bytes,
        }

    def statistics(self) -> Mapping[str, float]:
        passes_s, idle_s = self._passes_before_s + self._passes_s, self._idle_before_s + self._idle_s
        return {"bubble_share": idle_s / passes_s if passes_s else 0.0}

    def _goes_on(self, rank: int, reason: str) -> bool:
        """Return True if this worker completes its round without a lost one. On the transport's thread."""
        if not self.tolerates_loss_mid_step:
            return False
        self._lost = self._lost or reason
        self._averaging.mailbox.lose(rank)
        self._claims.lose(rank, reason)
        self._signals.lose(rank)
        return True

    def _take_first_pipelines(self) -> None:
        """All replicas of a stage become the first pipeline's: models may have been made unlike. Raises PeerLost."""
        ranks = self._place.replicas
        weight = 1.0 if self._place.pipeline == 0 else 0.0
        if len(ranks) > 1:
            self._averaged_over(Grouped(0, START_OF_RUN, dict.fromkeys(ranks, 0)), weight)
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _next_batch(self, batches: int) -> Answer:
        """The next batch of the round that no pipeline has, or with whom to average at its end."""
        begun_s, idle_s = time.monotonic(), self._links.waited_s
        self._session.throttle.pay()
        ended = Answer(self._place.pipeline, 0, Say.END, members=tuple(range(self._place.pipelines)))

        def claim(none_now: Callable[[], None]) -> int | None:
            nonlocal ended
            answer = self._claims.next(self._batches, none_now, averages=self._under_way is not None)
            if answer.say is Say.WAIT:
                self._finish_average()
                answer = self._claims.next(self._batches, none_now)
            if answer.say is Say.BATCH:
                return answer.batch
            ended = answer
            return None

        number = self._links.agree_on_batch(claim, self._train_no_more)
        self._session.throttle.resume()
        if number is None:
            return ended
        self._passes_s += time.monotonic() - begun_s
        self._idle_s += self._links.waited_s - idle_s
        return Answer(self._place.pipeline, 0, Say.BATCH, number)

    def _indices(self, number: int) -> list[int]:
        """Return the sample indices of the round's batch of this number."""
        taken, size = self._taken, self._parts.batch_size
        assert taken is not None
        begin = taken.start + number * size
        return self._order.indices(taken.epoch, begin, min(begin + size, taken.start + taken.total))

    def _micros(self, indices: list[int]) -> list[MicroBatch]:
        size = math.ceil(len(indices) / self._parts.micro_batches)
        parts = [indices[at : at + size] for at in range(0, len(indices), size)]
        return [MicroBatch(len(one) / len(indices), partial(self._fetched, one)) for one in parts]

    def _micros_ahead(self) -> list[MicroBatch]:
        """Return the pipeline's next micro-batches if they may begin before this batch is over: beside them, as with
        averages, the update is not one process's."""
        if not self._overlaps:
            return []

        def claim() -> int | None:
            answer = self._claims.next(self._batches, lambda: None, averages=True)
            return answer.batch if answer.say is Say.BATCH else None

        self._session.throttle.pay()
        number = self._links.know_ahead(claim)
        self._session.throttle.resume()
        return self._micros(self._indices(number)) if number is not None else []

    def _update(self, indices: list[int]) -> float:
        """One local update. Returns the mean loss; 0 where another stage knows it."""
        parts = self._parts
        self._optimizer.zero_grad()
        begun_s, idle_s, wait_s = time.monotonic(), self._links.waited_s, self._wait_s
        loss = self._executor.run(self._micros(indices), self._micros_ahead)
        if parts.clip_norm is not None:
            clip_over_stages(self._model.parameters(), parts.clip_norm, self._links)
        self._finish_average()
        self._optimizer.step()
        self._session.throttle.pay()
        self._passes_s += time.monotonic() - begun_s - (self._wait_s - wait_s)
        self._idle_s += self._links.waited_s - idle_s
        return loss

    def _fetched(self, indices: list[int]) -> tuple[Any, Any]:
        """Augmented alike wherever that is drawn: the first stage takes the inputs of it, the last one the targets."""
        parts = self._parts
        with Generators(mixed_seed(self._session.seed, self._round, *indices)).in_place_of_global():
            batch = parts.collate_fn([parts.dataset[one] for one in indices])
        return pair_of(batch, self._session.device)

    def _say_ready(self) -> None:
        """Signal that this replica is ready to average after a local update; the next batch's passes run beside it."""
        if self._place.pipelines == 1:
            return
        self._under_way = self._averager.submit(self._average_if_grouped, self._since_average, self._batches)
        if not self._overlaps:
            self._finish_average()

    def _average_if_grouped(self, samples: int, batches: int) -> LocalAverage | None:
        """Average with the group, if there is one, on the averager's thread. samples: trained since this replica's
        last average."""
        answer = self._signals.ready()
        made = None
        if answer is not None and len(answer.members) > 1:
            state_N = np.append(self._state.read(), np.float32(0))
            group = Grouped(self._round, answer.group, dict(zip(answer.members, answer.signals, strict=True)))
            made = LocalAverage(self._averaging.average(group, state_N, float(samples), batches), state_N)
        self._averaging.mailbox.pass_by(self._signals.newest)
        return made

    def _finish_average(self) -> None:
        """Wait for this replica's average and apply it. Raises PeerLost."""
        if self._under_way is None:
            return
        self._session.throttle.pay()
        begun_s = time.monotonic()
        made = self._under_way.result()
        self._under_way = None
        averaged = made.averaged if made is not None else None
        if made is not None and averaged is not None:
            self._take_over(averaged, made.state_N)
            self._since_average = 0
        self._sizes.append(1 if averaged is None else len(averaged.members))
        self._wait_s += time.monotonic() - begun_s
        self._session.throttle.resume()  # all this was no computing

    def _train_no_more(self) -> None:
        """None of the round's batches is left to claim."""
        self._finish_average()
        self._signals.done()

    def _break_off(self) -> None:
        """This engine is not used any more."""
        if self._under_way is None:
            return
        for one in (self._signals, self._averaging.mailbox):
            one.fail("training in this round has ended")
        wait([self._under_way])
        self._under_way = None

    def _take_over(self, averaged: Average, state_N: F32) -> None:
        self._state.write(averaged.state_N[:-1], averaged.replicas, state_N[:-1])
        self._batches = averaged.batches
        now_s = time.monotonic()
        self._unaveraged_s = max(self._unaveraged_s, now_s - self._averaged_s)
        self._averaged_s = now_s

    def _end_round(self, pipelines: Sequence[int], loss: float) -> float:
        """The replicas of each stage average, weighted by what they trained in the round. Returns the loss of the whole
        round."""
        self._session.throttle.pay()
        begun_s = time.monotonic()
        if len(pipelines) > 1:
            members = [self._place.replicas[one] for one in pipelines]
            group = Grouped(self._round, ROUND_ENDS + len(members), dict.fromkeys(members, 0))
            loss = self._averaged_over(group, float(self._trained), loss)
        loss = self._links.last_stages(loss)
        self._wait_s += time.monotonic() - begun_s
        self._session.throttle.resume()
        return loss

    def _averaged_over(self, group: Grouped, weight: float, number: float = 0.0) -> float:
        """Average with a group that nobody may decline. Returns the average of the number."""
        state_N = np.append(self._state.read(), np.float32(number))
        averaged = self._averaging.average(group, state_N, weight, self._batches)
        if averaged is None:
            return number  # alone
        self._take_over(averaged, state_N)
        weights = self._state.weights
        self._disagreement = distance(state_N[:weights], averaged.state_N[:weights])
        return float(averaged.state_N[-1])
