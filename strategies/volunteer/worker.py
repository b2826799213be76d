"""Strategy `volunteer`'s worker half: an Engine whose step is the exact gradient of its batch, whoever computes it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from atoll.agent.runtime.channel import membership
from atoll.agent.runtime.data.loader import sample_count
from atoll.agent.runtime.data.orders import EpochOrder
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.data.split import split_batch
from atoll.agent.runtime.pipeline.executor import CLIP_EPSILON
from atoll.agent.runtime.pipeline.script_autocast import ScriptAutocast
from atoll.agent.runtime.session.session import Session
from atoll.agent.runtime.strategy_interface.capabilities import EngineParts, WorkerContext, WorkerHalf
from atoll.agent.runtime.transport.process_groups import Group
from atoll.errors import BadInput, PeerLost
from atoll.security.volunteer_ticket import is_ticket
from atoll.strategies.volunteer.messages import MAX_TENSOR_BYTES, Server
from atoll.strategies.volunteer.port import VolunteerPort
from atoll.strategies.volunteer.settings import Volunteer
from atoll.strategies.volunteer.stage_passes import StagePasses, UnsentState, device_kind
from atoll.strategies.volunteer.stage_step import StageStep
from atoll.strategies.volunteer.task_server import SELF, TaskServer
from atoll.strategies.volunteer.tasks import Task
from atoll.v1.agents_pb2 import DataKeys
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING, LinkSample

WAIT_S: Final = 0.2
"""Wait for an answer, in seconds, between checks of the volunteers' connections and the run's members."""
COUNTED: Final = ("volunteers", "waiting", "answered", "returned", "late", "refused")


def build(context: WorkerContext) -> WorkerHalf:
    assert context.engine_parts is not None  # or check_script had refused it
    engine = VolunteerEngine(context, context.engine_parts)
    return WorkerHalf(engine, measures=engine, links=engine.links, learned=engine)


class VolunteerEngine:
    """An Engine and its Measures. Each pipeline of ranks has a part of the batch, as the ranks of any synchronous run,
    and each of its ranks a task pool and volunteers of its own; a stage's sums are added up over the pipelines before
    the update.

    The port's thread hears volunteers and counts their answers, the wire's the other stages; all that is computed is
    on the training thread.

    Where a rank is lost and others have all of the model, they go on in place: volunteers stay where they are. Of whole
    models what counted on those who are left counts on, and they share what the lost one had of the step; of stages the
    step is made again. So each sample counts once, and no more is lost than what the lost rank had of one step."""

    _passes: StagePasses
    _step: StageStep

    def __init__(self, context: WorkerContext, parts: EngineParts) -> None:
        session, place = context.session, parts.place
        assert isinstance(context.settings, Volunteer)
        self._session, self._parts, self._channel = session, parts, context.channel
        self._coarsest = context.settings.thin_links
        (self._optimizer,) = context.optimizers
        self._order = EpochOrder(lambda: sample_count(parts.dataset), session.seed, parts.shuffle)
        self._replicas: Group | None = None  # who hold this stage
        self._told: dict[str, float] = {}
        self._updated = -1  # the last step that changed the model
        self._autocast = ScriptAutocast(session.device.type)  # of the steps before
        self._shared_out = session.view == 1  # what is left of the step that the view before broke off
        before = context.learned if isinstance(context.learned, VolunteerEngine) else None  # of the view before
        self._port: VolunteerPort | None = before._port if before is not None else None
        self._server: TaskServer | None = before._server if before is not None else None
        self._unsent: UnsentState | None = None  # where volunteers may help
        if before is not None:
            self._passes, self._step, self._autocast = before._passes, before._step, before._autocast
            self._unsent = before._unsent
            self._step.enter(place, context.channel.send)
            return
        cuts = (*parts.part.cuts, 0) if parts.part is not None else (0, 0)
        layers = cuts[place.stage], cuts[place.stage + 1]
        self._passes = StagePasses(session, context.model, parts, first=place.first, last=place.last)
        self._step = StageStep(place, self._passes, layers, context.channel.send, self._tell)
        self._step.pool.join(SELF, 1.0)
        if session.keys is not None and session.keys.volunteers:
            self._unsent = UnsentState(context.model, self._passes.parameters)

    def start(self) -> None:
        """Collective."""
        session, place = self._session, self._parts.place
        self._replicas = session.group
        if session.group is not None and place.stages > 1:
            self._channel.all_connected()
            self._channel.connect_receiver(self._step, ())
            self._autocast = ScriptAutocast(session.device.type)
            self._step.learn_shapes(session.collective_timeout_s)
            parts = [tuple(range(stage, place.stages * place.pipelines, place.stages)) for stage in range(place.stages)]
            self._replicas = session.group.parted(parts, session.collective_timeout_s) if place.pipelines > 1 else None
        if self._replicas is not None and place.stages > 1:  # of whole models training does
            weights_P = self._passes.weights().to(session.device)
            self._replicas.level(weights_P, "receiving the stage from the first pipeline")
            self._passes.load(weights_P.cpu())
        if session.keys is not None and session.keys.volunteers:
            if self._server is None:
                self._open_port(session, session.keys)
            else:
                with self._step.changed:
                    self._server.version += 1  # another member's weights may have been later ones
            self._introduce(session, session.keys)

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """batch: [local] numbers of samples. Returns the mean loss over the samples of all pipelines, [], the same on
        each."""
        autocast = ScriptAutocast.current(self._session.device.type)
        with autocast.left():
            if autocast != self._autocast:
                self._autocast = autocast
                self._step.learn_shapes(self._session.collective_timeout_s, bfloat16=autocast.enabled)
            return self._trained(batch, taken)

    def _trained(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        counted: list[int] = []
        begun_s = time.monotonic()
        self._look_at_what_volunteers_lack()
        if self._shared_out or self._parts.place.stages > 1:
            indices = self._own_samples(batch, taken)
        else:
            counted, indices = self._left_over(taken)
            self._shared_out = True
        size = math.ceil(len(indices) / self._parts.micro_batches) or 1
        step, samples = self._step, len(counted) + len(indices)
        step.begin(taken.step, [indices[at : at + size] for at in range(0, len(indices), size)], counted)
        while not step.finished:
            self._advance()
        if step.samples != samples:
            raise BadInput(f"step {taken.step} counted {step.samples} of {samples} samples: a fault of Atoll")
        computed_s = time.monotonic()
        loss = self._update(taken)
        ended_s = time.monotonic()
        self._told["update_share"] = (ended_s - computed_s) / max(ended_s - begun_s, 1e-9)
        return torch.tensor(loss)

    @property
    def why_not_in_place(self) -> str | None:
        place = self._parts.place
        return "nobody else has its stage" if place.stages > 1 and place.pipelines == 1 else None

    @property
    def tolerates_loss_mid_step(self) -> bool:
        return False

    @property
    def lost(self) -> str | None:
        return None  # a step without a rank is none

    def rewind(self, step: int) -> bool:
        """Only what comes before the update raises; that is not taken back."""
        return self._updated < step

    def close(self, *, followed: bool = False) -> None:
        if self._port is not None and not followed:
            self._port.close()

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        return self._told

    def statistics(self) -> Mapping[str, float]:
        return self._told

    def links(self) -> list[LinkSample]:
        """Return the links to volunteers."""
        return self._server.links() if self._server is not None else []

    def _open_port(self, session: Session, keys: DataKeys) -> None:
        """Let volunteers help from now on."""
        weights_bytes, micro = 4 * self._passes.size, math.ceil(self._parts.batch_size / self._parts.micro_batches)
        micro_bytes = micro * self._step.row_bytes
        most_bytes = max(MAX_TENSOR_BYTES, max(weights_bytes, micro_bytes) + 4096)
        self._port = VolunteerPort(session, keys, most_bytes)
        self._server = TaskServer(
            self._port.socket,
            self._step,
            recognises=lambda name, shown: _shows(keys.volunteers, name, shown),
            tell=self._tell,
            power=session.link.welcome.speed if session.link is not None else 1.0,
            most_bytes=most_bytes,
            model_bytes=weights_bytes + micro_bytes,
            coarsest=self._coarsest,
            device=device_kind(session.device),
        )
        self._step.pool, self._step.changed, self._step.wake = self._server.pool, self._server.changed, self._port.wake
        self._port.serve(self._server)

    def _introduce(self, session: Session, keys: DataKeys) -> None:
        """All ranks to each other: volunteers measure how far each one is. Collective."""
        if session.group is None or self._server is None or session.link is None:
            return
        mine = f"{session.link.id.rank}\0{membership.host(session)}\0{session.link.volunteer_port}".encode()
        told = [one.decode().split("\0") for one in session.group.gather_bytes(mine)]
        servers = [
            Server(int(rank), host, int(port), keys.public[place].hex())
            for place, (rank, host, port) in enumerate(told)
        ]
        with self._step.changed:
            self._server.servers = servers

    def _own_samples(self, batch: Any, taken: BatchSlice) -> list[int]:
        """The pipeline's part of the batch, as numbers of samples."""
        place = self._parts.place
        if place.stages == 1:
            return [int(one) for one in batch] if taken.local else []
        stages = place.stages
        shares = [sum(taken.shares[stages * one : stages * (one + 1)]) for one in range(place.pipelines)]
        counts = split_batch(taken.total, shares)
        begin = taken.start + sum(counts[: place.pipeline])
        return self._order.indices(taken.epoch, begin, begin + counts[place.pipeline])

    def _left_over(self, taken: BatchSlice) -> tuple[list[int], list[int]]:
        """The first step of a view that followed another: which of its samples counted on this rank already, and which
        it has of those that counted on none. Collective."""
        group, place = self._session.group, self._parts.place
        whole = self._order.indices(taken.epoch, taken.start, taken.start + taken.total)
        own = self._step.counted(taken.step)
        mine = np.array(own, np.int64).tobytes()
        all_told = [mine] if group is None else group.gather_bytes(mine)
        told = [np.frombuffer(one, np.int64).tolist() for one in all_told]
        counted = {number for one in told for number in one}
        if not counted <= set(whole):  # the plan of the new view may have made the batch a smaller one
            own, counted = [], set()
        left = [one for one in whole if one not in counted]
        if counted and place.rank == 0:
            text = f"step {taken.step} goes on: {len(counted)} of its {len(whole)} samples count already"
            self._tell(text, False)
        counts = split_batch(len(left), taken.shares or (1.0,))
        begin = sum(counts[: place.rank])
        return own, left[begin : begin + counts[place.rank]]

    def _look_at_what_volunteers_lack(self) -> None:
        """Let nobody help where the script wrote what volunteers have from their own."""
        if self._server is None or self._unsent is None or not (names := self._unsent.rewritten()):
            return
        with self._step.changed:
            self._server.refuse_all(
                f"the script wrote {', '.join(names[:3])} of the model since run.prepare_pipeline, and volunteers are "
                "sent trained parameters alone. Write it before, or train without volunteers"
            )

    def _advance(self) -> None:
        """Compute what is to be compared, else a task; where there is neither, wait for others."""
        step, server = self._step, self._server
        if server is not None and server.check():
            return
        with step.changed:
            now_s = time.monotonic()
            task = step.pool.ask(SELF, now_s)
            if task is None and step.pool.reclaim(now_s):
                task = step.pool.ask(SELF, now_s)
            if task is None and not (step.finished or step.broken or (server is not None and server.unchecked)):
                due_s = step.pool.next_overdue_s()
                step.changed.wait(WAIT_S if due_s is None else min(WAIT_S, max(0.0, due_s - now_s)))
        if task is not None:
            answer = step.compute_own(task)
            with step.changed:
                if isinstance(step.pool.answer(SELF, task.number, time.monotonic()), Task):
                    step.take(SELF, task, answer)
        if step.broken is not None:
            raise step.broken
        if (group := self._session.group) is not None and group.aborted:
            raise PeerLost("the run has other members")
        if self._port is not None and self._port.failure is not None:
            raise self._port.failure

    def _update(self, taken: BatchSlice) -> float:
        """Add up over the pipelines what they have of the batch, and make the update. Returns the mean loss."""
        step, group, passes, parts, total = self._step, self._session.group, self._passes, self._parts, taken.total
        sum_P = step.sum_P.to(self._session.device, copy=self._replicas is not None)  # its own part may be needed again
        if self._replicas is not None:
            self._replicas.begin_sum(sum_P, "combining gradients").wait()
        passes.set_gradient(sum_P / total)
        square = sum(float(one.grad.double().square().sum()) for one in passes.parameters if one.grad is not None)
        numbers = [step.loss, step.helped, *self._counts(), square if parts.place.pipeline == 0 else 0.0]
        summed = torch.tensor(numbers, dtype=torch.float64)
        if group is not None:
            group.sum_in_place(summed, "combining losses")
        loss, helped, *counted, square = summed.tolist()
        share = min(1.0, helped / (total * parts.place.stages))
        with step.changed:
            per_power = step.pool.per_power
        counts = dict(zip(COUNTED, counted, strict=True))
        self._told = {"volunteers_share": share, "per_power": per_power, **counts}
        if parts.clip_norm is not None and (factor := parts.clip_norm / (math.sqrt(square) + CLIP_EPSILON)) < 1:
            for one in passes.parameters:
                if one.grad is not None:
                    one.grad.mul_(factor)
        with step.changed:
            self._updated = taken.step
            self._optimizer.step()
            if self._server is not None:
                self._server.version += 1
        self._optimizer.zero_grad()
        return float(loss) / total

    def _counts(self) -> list[float]:
        """Return the counts of COUNTED on this rank."""
        with self._step.changed:
            pool = self._step.pool
            own = pool.counted[SELF]
            volunteers, waiting = (self._server.volunteers, self._server.waiting) if self._server else (0, 0)
            counted, refused = pool.counted.total() - own, pool.refused.total() - pool.late
            return [float(one) for one in (volunteers, waiting, counted, pool.returned, pool.late, refused)]

    def _tell(self, text: str, wrong: bool) -> None:
        self._session.notice(LEVEL_WARNING if wrong else LEVEL_INFO, f"volunteers: {text}")


def _shows(secret: bytes, name: str, shown: str) -> bool:
    try:
        return is_ticket(secret, name, bytes.fromhex(shown))
    except ValueError:
        return False
