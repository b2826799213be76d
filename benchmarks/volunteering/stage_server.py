"""A stage of the pipeline: weights and optimizer, delayed updates, its neighbour; and the work of its task server."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.strategies.volunteer.checks import Wanted
from atoll.strategies.volunteer.delayed_update import DelayedUpdate
from atoll.strategies.volunteer.messages import read, written
from atoll.strategies.volunteer.task_pool import Task
from atoll.strategies.volunteer.task_server import SELF, TaskServer
from volunteering.course import COMPUTE, WIDTH, Course, stage_of, wanted

IDLE_MS = 20


class StageServer:
    """Of stage 0, which begins steps and ends them, or of stage 1, the last."""

    def __init__(
        self, course: Course, stage: int, socket: zmq.Socket[bytes], other: zmq.Socket[bytes], told: Path
    ) -> None:
        self._course, self._stage, self._socket, self._other = course, stage, socket, other
        self._told = told.open("w", buffering=1)
        self._model = stage_of(stage)
        self._twin = stage_of(stage)  # for checks: gradients of its own
        self._twin.load_state_dict(self._model.state_dict())
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-3)
        self._update = DelayedUpdate(list(self._model.parameters()), optimizer)
        self._server = TaskServer(
            socket,
            self,
            recognises=lambda _, shown: shown == course.token,
            tell=lambda what, _: self._tell(kind="event", what=what),
        )
        self._own: tuple[Task, float] | None = None  # until when the server itself computes
        self._step, self._attempt, self._loss = -1, 0, 0.0
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._other, zmq.POLLIN)
        if self._stage == 0:
            self._begin(0, 0)
        while self._step < self._course.steps:
            ready = dict(poller.poll(self._idle_ms()))
            if self._other in ready:
                self._from_neighbour(*read(self._other.recv_multipart()))
            self._server.receive()
            while self._server.check():
                pass
            self._compute_own()
        self._update.flush()
        self._server.end()
        pool = self._server.pool
        self._tell(kind="end", counted=dict(pool.counted), refused={str(k): v for k, v in pool.refused.items()})
        self._told.close()

    def _idle_ms(self) -> int:
        due_s = [
            one for one in (self._server.pool.next_deadline_s(), self._own[1] if self._own else None) if one is not None
        ]
        left_s = min([IDLE_MS / 1000, *(one - time.monotonic() for one in due_s)])
        return max(0, math.ceil(left_s * 1000))

    def _begin(self, step: int, attempt: int) -> None:
        self._step, self._attempt, self._loss, self._own = step, attempt, 0.0, None
        self._server.pool.begin_step()
        self._update.discard()
        self._inputs, self._outputs, self._gradients = {}, {}, {}
        if self._stage or step >= self._course.steps:
            return
        for micro in range(self._course.micros):
            self._inputs[micro] = self._course.batch(step, micro)[0]
            self._outputs[micro] = torch.zeros(self._course.samples, WIDTH)
            self._server.pool.add(Direction.FORWARD, micro, self._course.samples)

    def _from_neighbour(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        key = (header["step"], header["attempt"])
        if header["kind"] == "redo" and key > (self._step, self._attempt):
            self._begin(*key)
            return
        if self._stage == 1 and header["kind"] == "activations":
            if key > (self._step, self._attempt):
                self._begin(*key)
            if key != (self._step, self._attempt):
                return
            self._inputs[header["micro"]] = tensors[0]
            self._outputs[header["micro"]] = torch.zeros_like(tensors[0])
            self._server.pool.add(Direction.BACKWARD, header["micro"], self._course.samples)
        elif key == (self._step, self._attempt) and header["kind"] == "gradients":
            self._gradients[header["micro"]] = tensors[0]
            self._server.pool.add(Direction.BACKWARD, header["micro"], self._course.samples)
        elif key == (self._step, self._attempt) and header["kind"] == "commit":
            self._commit()

    def header(self, task: Task) -> dict[str, Any]:
        return {"work": self._work(task), "step": self._step, "attempt": self._attempt}

    def weights(self) -> torch.Tensor:
        return self._update.weights()

    def wanted(self, task: Task) -> Sequence[Wanted]:
        return wanted(self._work(task), task.samples, self._update.size)

    def _work(self, task: Task) -> str:
        return "last" if self._stage == 1 else task.direction.value

    def given(self, task: Task) -> list[torch.Tensor]:
        rows = slice(task.begin, task.end)
        inputs = self._inputs[task.micro][rows]
        if self._stage == 1:
            return [inputs, self._course.batch(self._step, task.micro)[1][rows]]
        return [inputs] if task.direction is Direction.FORWARD else [inputs, self._gradients[task.micro][rows]]

    def compute(self, task: Task) -> list[torch.Tensor]:
        self._twin.load_state_dict(self._model.state_dict())
        return COMPUTE[self._work(task)](self._twin, self.given(task))

    def _compute_own(self) -> None:
        now_s = time.monotonic()
        if self._own is not None and self._own[1] <= now_s:
            task, _ = self._own
            self._own = None
            self._server.count(SELF, task.number, self.compute(task))
        if self._own is None and (found := self._server.pool.ask(SELF, now_s)) is not None:
            self._own = (found, now_s + found.samples * self._course.sample_s)

    def begin_again(self) -> None:
        """The other stage too; unless it may have ended the step by now."""
        if not all(self._server.pool.done(Direction.BACKWARD, micro) for micro in range(self._course.micros)):
            self._send("redo", 0, [], attempt=self._attempt + 1)
            self._begin(self._step, self._attempt + 1)

    def take(self, client: str, task: Task, answer: Sequence[torch.Tensor]) -> None:
        pool, rows = self._server.pool, slice(task.begin, task.end)
        if self._stage == 1:
            self._outputs[task.micro][rows] = answer[0]
            self._update.add(answer[1], task.samples)
            self._loss += float(answer[2])
        elif task.direction is Direction.FORWARD:
            self._outputs[task.micro][rows] = answer[0]
        else:
            self._update.add(answer[0], task.samples)
        if not pool.done(task.direction, task.micro):
            return
        if self._stage == 1:
            self._send("gradients", task.micro, [self._outputs[task.micro]])
        elif task.direction is Direction.FORWARD:
            self._send("activations", task.micro, [self._outputs[task.micro]])
        elif all(pool.done(Direction.BACKWARD, micro) for micro in range(self._course.micros)):
            self._send("commit", 0, [])
            self._commit()

    def _commit(self) -> None:
        samples = self._update.samples
        self._update.end_step()
        self._server.version += 1
        self._tell(
            kind="step", step=self._step, attempt=self._attempt, samples=samples, loss=self._loss / max(samples, 1)
        )
        self._begin(self._step + 1, 0)

    def _send(self, kind: str, micro: int, tensors: list[torch.Tensor], *, attempt: int | None = None) -> None:
        at = self._attempt if attempt is None else attempt
        self._other.send_multipart(written({"kind": kind, "step": self._step, "attempt": at, "micro": micro}, tensors))

    def _tell(self, **what: Any) -> None:
        self._told.write(json.dumps({"at_s": time.time(), **what}) + "\n")


def serve(course: Course, stage: int, ports: tuple[int, int, int], folder: Path) -> None:
    """ports: of stage 0 and 1 for volunteers, and between the two."""
    torch.set_num_threads(1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, context.socket(zmq.PAIR) as other:
        socket.linger = other.linger = 1000
        socket.bind(f"tcp://127.0.0.1:{ports[stage]}")
        if stage == 0:
            other.bind(f"tcp://127.0.0.1:{ports[2]}")
        else:
            other.connect(f"tcp://127.0.0.1:{ports[2]}")
        StageServer(course, stage, socket, other, folder / f"stage-{stage}.jsonl").run()
