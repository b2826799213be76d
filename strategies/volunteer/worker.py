"""Strategy `volunteer`'s worker half: an Engine whose step is the exact gradient of its batch, whoever computes it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.step.capabilities import EngineParts, WorkerContext, WorkerHalf
from atoll.errors import BadInput
from atoll.jobspec import MAX_WORKERS
from atoll.strategies.volunteer.checks import Wanted
from atoll.strategies.volunteer.messages import MAX_TENSOR_BYTES
from atoll.strategies.volunteer.port import VolunteerPort
from atoll.strategies.volunteer.sample_gradients import SampleGradients
from atoll.strategies.volunteer.settings import Volunteer
from atoll.strategies.volunteer.task_pool import Task, TaskPool
from atoll.strategies.volunteer.task_server import SELF, TaskServer
from atoll.telemetry_limits import MAX_LINKS, WAITS
from atoll.v1.common_pb2 import LEVEL_INFO, LEVEL_WARNING, LinkSample
from atoll.volunteer_ticket import is_ticket

WAIT_S: Final = 1.0
"""For an answer; then it is looked whether volunteers are still heard at all."""
COUNTED: Final = ("volunteers", "waiting", "answered", "returned", "late", "refused")


def build(context: WorkerContext) -> WorkerHalf:
    if context.engine_parts is None:
        raise BadInput("strategy volunteer computes the step itself: call run.prepare_pipeline in place of run.prepare")
    engine = VolunteerEngine(context, context.engine_parts)
    return WorkerHalf(engine, measures=engine, links=engine.links)


class VolunteerEngine:
    """An Engine, its Measures, and the StageWork of its task server. Ranks are replicas: each has a part of the batch,
    as in any synchronous run, with a task pool and volunteers of its own; their sums are added up before the update.

    The port's thread hears volunteers and counts their answers; all that is computed is on the training thread."""

    def __init__(self, context: WorkerContext, parts: EngineParts) -> None:
        session = context.session
        assert isinstance(context.settings, Volunteer)
        self._session, self._parts = session, parts
        (self._optimizer,) = context.optimizers
        self._gradients = SampleGradients(session, context.model, parts)
        self._sum_P = torch.zeros(self._gradients.size)
        self._loss = self._samples = self._helped = 0.0
        self._step = 0
        self._micros: list[list[int]] = []  # the indices of this step's samples
        self._weights_P: torch.Tensor | None = None  # of this step, once a volunteer needs them
        self._told: dict[str, float] = {}
        self._port: VolunteerPort | None = None
        self._server: TaskServer | None = None
        self._pool, self._changed = TaskPool(), threading.Condition()
        if session.keys is not None and (secret := session.keys.volunteers):
            most_bytes = max(MAX_TENSOR_BYTES, 4 * self._gradients.size + 4096)
            self._port = VolunteerPort(session, session.keys, most_bytes)
            self._server = TaskServer(
                self._port.socket,
                self,
                recognises=lambda name, shown: _shows(secret, name, shown),
                tell=self._tell,
                power=session.link.welcome.speed if session.link is not None else 1.0,
                most_bytes=most_bytes,
                model_bytes=4 * self._gradients.size,
                coarsest=context.settings.thin_links,
            )
            self._pool, self._changed = self._server.pool, self._server.changed
        else:
            self._pool.join(SELF, 1.0)

    def start(self) -> None:
        if self._port is not None and self._server is not None:
            self._port.serve(self._server)

    def step(self, batch: Any, taken: BatchSlice) -> torch.Tensor:
        """batch: [local] numbers of samples. Returns the mean loss over the samples of all ranks, [], the same on
        each."""
        indices = [int(one) for one in batch] if taken.local else []
        size = math.ceil(len(indices) / self._parts.micro_batches) or 1
        self._micros = [indices[at : at + size] for at in range(0, len(indices), size)]
        with self._changed:
            self._step, self._weights_P = taken.step, None
            self._open_pool()
        while not self._done():
            self._advance()
        if round(self._samples) != len(indices):
            raise BadInput(f"step {taken.step} counted {self._samples:.0f} of {len(indices)} samples: a fault of Atoll")
        return torch.tensor(self._update(taken.total))

    @property
    def why_not_in_place(self) -> str | None:
        return "the engine of strategy volunteer starts again"

    @property
    def lost(self) -> str | None:
        return None  # a step without a rank is none

    def rewind(self, step: int) -> bool:
        """Only adding up raises, before the update."""
        return True

    def close(self) -> None:
        if self._port is not None:
            self._port.close()

    def take_step(self, stall_s: float, sent_bytes: int) -> Mapping[str, float]:
        return self._told

    def statistics(self) -> Mapping[str, float]:
        return self._told

    def links(self) -> list[LinkSample]:
        """Those to volunteers."""
        shown = self._server.links() if self._server is not None else []
        return [
            LinkSample(
                peer=MAX_WORKERS + one.use.number,
                sent_bytes=one.use.to_bytes,
                received_bytes=one.use.from_bytes,
                volunteer=one.name,
                wait_share=one.use.wait_share,
                form=WAITS if one.waits else one.use.seen.form if one.there else "",
                differs=one.use.differs,
            )
            for one in shown[:MAX_LINKS]
        ]

    # --- StageWork

    def header(self, task: Task) -> dict[str, Any]:
        return {"step": self._step}

    def given(self, task: Task) -> list[torch.Tensor]:
        return [torch.tensor(self._indices(task), dtype=torch.int64)]

    def wanted(self, task: Task) -> Sequence[Wanted]:
        return [((self._gradients.size,), torch.float32), ((1,), torch.float32)]

    def compute(self, task: Task) -> list[torch.Tensor]:
        return self._gradients.compute(self._indices(task), self._step)

    def take(self, client: str, task: Task, answer: Sequence[torch.Tensor]) -> None:
        self._sum_P += answer[0]
        self._loss += float(answer[1])
        self._samples += task.samples
        self._helped += task.samples if client != SELF else 0

    def weights(self) -> torch.Tensor:
        if self._weights_P is None:
            self._weights_P = self._gradients.weights()
        return self._weights_P

    def begin_again(self) -> None:
        self._tell(f"step {self._step} begins again: something counted in it that may be wrong", True)
        self._open_pool()

    # --- a step

    def _open_pool(self) -> None:
        self._pool.begin_step()
        self._sum_P.zero_()
        self._loss = self._samples = self._helped = 0.0
        for number, indices in enumerate(self._micros):
            self._pool.add(Direction.BACKWARD, number, len(indices))
        if self._port is not None:
            self._port.wake()

    def _advance(self) -> None:
        """Compute what is to be compared, else a task; where there is neither, wait for volunteers' answers."""
        if self._server is not None and self._server.check():
            return
        with self._changed:
            task = self._pool.ask(SELF, time.monotonic())
            if task is None and self._pool.reclaim(time.monotonic()):
                task = self._pool.ask(SELF, time.monotonic())
        if task is not None:
            answer = self.compute(task)
            with self._changed:
                if isinstance(self._pool.answer(SELF, task.number, time.monotonic()), Task):
                    self.take(SELF, task, answer)
            return
        with self._changed:
            if not self._done() and self._server is not None and not self._server.unchecked:
                due_s = self._pool.next_overdue_s()
                self._changed.wait(WAIT_S if due_s is None else min(WAIT_S, max(0.0, due_s - time.monotonic())))
        if self._port is not None and self._port.failure is not None:
            raise self._port.failure

    def _indices(self, task: Task) -> list[int]:
        return self._micros[task.micro][task.begin : task.end]

    def _done(self) -> bool:
        with self._changed:
            return all(self._pool.done(Direction.BACKWARD, number) for number in range(len(self._micros)))

    def _update(self, total: int) -> float:
        """Add up over the ranks what they have of the batch, and make the update. Returns the mean loss."""
        numbers = [self._loss, self._helped, *self._counts()]
        summed = torch.cat([self._sum_P, torch.tensor(numbers)]).to(self._session.device)
        if (group := self._session.group) is not None:
            group.begin_sum(summed, "combining gradients").wait()
        loss, helped, *counted = summed[self._gradients.size :].tolist()
        self._told = {"volunteers_share": min(1.0, helped / total), **dict(zip(COUNTED, counted, strict=True))}
        self._gradients.set_gradient(summed[: self._gradients.size] / total)
        if self._parts.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._gradients.parameters, self._parts.clip_norm)
        with self._changed:
            self._optimizer.step()
            if self._server is not None:
                self._server.version += 1
        self._optimizer.zero_grad()
        return float(loss) / total

    def _counts(self) -> list[float]:
        """As in COUNTED, of this rank."""
        with self._changed:
            pool, own = self._pool, self._pool.counted[SELF]
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
