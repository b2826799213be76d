"""A step of one stage: its tasks, what comes from the stages beside it, and when all of the pipeline have made theirs.

A rank is frontal and backward server of its stage for its pipeline's part of each batch: it has the stage's inputs and
the list of who made which activations. Nothing of a step is in the model before all stages of the pipeline are done, so
that a rank that is lost takes no more along than the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Final, NamedTuple

import torch

from atoll.agent.runtime.model.places import StagePlace
from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.pipeline.wire import packed, unpacked
from atoll.agent.runtime.transport.frames import Kind
from atoll.errors import AtollError, BadInput, PeerLost
from atoll.strategies.volunteer.checks import Wanted
from atoll.strategies.volunteer.stage_passes import UNREACHED, StagePass, StagePasses
from atoll.strategies.volunteer.task_pool import TaskPool
from atoll.strategies.volunteer.task_server import SELF
from atoll.strategies.volunteer.tasks import Task

MOST_EARLY: Final = 4096
"""Messages of a step that this rank has not begun."""


class StepPurpose(IntEnum):
    """The first byte of a message between the stages of a pipeline."""

    EXAMPLE = 1  # one sample's activations, before the first step
    FORWARD = 2  # a micro-batch's, for the next stage
    BACKWARD = 3  # their gradient, for the stage before
    DONE = 4  # the sender has made all of its part
    REDO = 5  # the step begins again, in the attempt that the message is of


class Key(NamedTuple):
    step: int
    attempt: int


class _Message(NamedTuple):
    key: Key
    purpose: StepPurpose
    origin: int
    micro: int
    tensor: torch.Tensor


_NOTHING: Final = torch.zeros(0)


class StageStep:
    """The StageWork of a task server, and the FrameReceiver of its pipeline. All but `compute` is used under `changed`,
    which is told of what counts, of what comes, and of a loss."""

    def __init__(
        self,
        place: StagePlace,
        passes: StagePasses,
        layers: tuple[int, int],
        send: Callable[[int, int, int, int, bytes | memoryview], None],
        tell: Callable[[str, bool], None],
    ) -> None:
        """layers: of the stage, [begin, end); an end of 0 is the model's. send: to rank, (step, attempt, micro-batch,
        payload). tell: people, and whether something is wrong."""
        self.pool, self.changed = TaskPool(), threading.Condition()
        self.wake: Callable[[], None] = lambda: None
        """Called where there are tasks to hand out."""
        self.sum_P = torch.full((passes.size,), UNREACHED)
        """Gradient of this stage, over what counted in the step."""
        self.loss = 0.0
        """Over what counted, on the last stage."""
        self.samples = self.helped = 0
        """That counted; by volunteers."""
        self.broken: AtollError | None = None
        """What makes the step impossible."""
        self._place, self._passes, self._layers, self._send, self._tell = place, passes, layers, send, tell
        self._mates = [one for one in place.mates if one != place.rank]
        self._row_in: Wanted | None = None  # of one sample, for stages after the first
        self._row_out: Wanted | None = None  # for those before the last
        self._examples: dict[bool, torch.Tensor] = {}  # one sample's activations, by whether they are of bfloat16
        self._bfloat16 = False  # passes run under torch.autocast
        self._key = Key(-1, 0)
        self._micros: Sequence[list[int]] = ()  # numbers of the pipeline's samples
        self._counted: list[int] = []  # of samples that are no task, for they counted when the run had other members
        self._inputs: dict[int, torch.Tensor] = {}  # by micro-batch
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}  # of the outputs
        self._input_gradients: dict[int, torch.Tensor] = {}
        self._early: list[_Message] = []
        self._own_done = False
        self._done: set[int] = set()  # of the other stages

    @property
    def finished(self) -> bool:
        """All stages of the pipeline have all samples of the step."""
        return self._own_done and len(self._done) == len(self._mates)

    @property
    def row_bytes(self) -> int:
        """Return the largest bytes of a sample into and out of the stage."""
        rows = [one for one in (self._row_in, self._row_out) if one is not None]
        return max((torch.Size(shape).numel() * dtype.itemsize for shape, dtype in rows), default=0)

    def learn_shapes(self, deadline_s: float, *, bfloat16: bool = False) -> None:
        """Send one sample through the pipeline. All stages call it before the first step, and before one whose passes
        run in another precision. bfloat16: under torch.autocast. Raises PeerLost."""
        self._bfloat16 = bfloat16
        if not self._mates:
            return
        place, given = self._place, torch.zeros(1, dtype=torch.int64)
        if not place.first:
            with self.changed:
                self.changed.wait_for(lambda: bfloat16 in self._examples or self.broken is not None, deadline_s)
                if self.broken is not None:
                    raise self.broken
                if bfloat16 not in self._examples:
                    raise PeerLost(f"rank {place.rank - 1} sent no sample's activations for {deadline_s:.0f} s")
                given = self._examples[bfloat16]
            self._row_in = (tuple(given.shape[1:]), given.dtype)
        if not place.last:
            outputs = self._passes.example(given, 0, bfloat16=bfloat16)
            self._row_out = (tuple(outputs.shape[1:]), outputs.dtype)
            self._send(place.rank + 1, 0, 0, int(bfloat16), memoryview(packed(StepPurpose.EXAMPLE, outputs)))

    def enter(self, place: StagePlace, send: Callable[[int, int, int, int, bytes | memoryview], None]) -> None:
        """The run goes on with other members. Of a step under way whole models keep what counted; stages have it no
        more, as not all of a pipeline may have each sample."""
        with self.changed:
            self._place, self._send, self.broken = place, send, None
            self._mates = [one for one in place.mates if one != place.rank]
            self._early.clear()
            if self._mates:
                self._key, self._micros = Key(-1, 0), ()
                self.pool.begin_step()

    def counted(self, step: int) -> list[int]:
        """Numbers of the samples that counted in this step so far. No answer to a task that is open counts any more."""
        with self.changed:
            if self._key.step != step:
                return []
            for micro, numbers in enumerate(self._micros):
                self._counted += [numbers[one] for one in self.pool.done_samples(Direction.BACKWARD, micro)]
            self._micros = ()
            self.pool.begin_step(same=True)
            return list(self._counted)

    def begin(self, step: int, micros: Sequence[list[int]], counted: Sequence[int] = ()) -> None:
        """micros: numbers of the pipeline's samples, the same on all of its stages. counted: of those that counted in
        it before, as `counted` told, and still do."""
        with self.changed:
            self._key, self._micros, self._counted = Key(step, 0), micros, list(counted)
            self._open(keep_counted=bool(counted))
            early, self._early = self._early, []
            for one in early:
                self._hear(one)

    # --- FrameReceiver, on the wire's thread

    def deliver(  # noqa: PLR0917 - the fields of a frame, in its order
        self, kind: int, origin: int, step: int, tensor: int, count: int, payload: bytes | memoryview
    ) -> str | None:
        """tensor: the attempt. count: the micro-batch. Returns why it was refused."""
        if kind != Kind.DIRECT or len(payload) < 1 or payload[0] not in set(StepPurpose):
            return "malformed"
        purpose, mine = StepPurpose(payload[0]), self._place.rank
        senders = {StepPurpose.EXAMPLE: [mine - 1], StepPurpose.FORWARD: [mine - 1], StepPurpose.BACKWARD: [mine + 1]}
        if origin not in self._mates or origin not in senders.get(purpose, self._mates):
            return "none of its neighbours"
        try:
            carried = unpacked(bytearray(payload)) if purpose in senders else _NOTHING  # its memory is the transport's
            with self.changed:
                return self._hear(_Message(Key(step, tensor), purpose, origin, count, carried))
        except (PeerLost, BadInput) as error:
            self.fail(str(error))
            return "malformed"

    def fail(self, reason: str) -> None:
        with self.changed:
            self.broken = self.broken or PeerLost(reason)
            self.changed.notify_all()

    def _hear(self, one: _Message) -> str | None:
        if one.purpose is StepPurpose.EXAMPLE:
            self._examples[bool(one.micro)] = one.tensor
        elif one.key < self._key:
            return "old step"
        elif one.key.step != self._key.step:
            if len(self._early) >= MOST_EARLY or (self._key.step >= 0 and one.key.step > self._key.step + 1):
                return "step too far ahead"
            self._early.append(one)
        else:
            if one.key.attempt > self._key.attempt:
                self._key = one.key
                self._open()
            self._take_over(one)
        self.changed.notify_all()
        return None

    def _take_over(self, one: _Message) -> None:
        """Raises PeerLost for what is none of the step."""
        if one.purpose is StepPurpose.DONE:
            self._done.add(one.origin)
        if one.purpose not in {StepPurpose.FORWARD, StepPurpose.BACKWARD}:
            return
        forward = one.purpose is StepPurpose.FORWARD
        into, row = (self._inputs, self._row_in) if forward else (self._gradients, self._row_out)
        assert row is not None
        samples = len(self._micros[one.micro]) if one.micro < len(self._micros) else 0
        if one.micro in into or (tuple(one.tensor.shape), one.tensor.dtype) != ((samples, *row[0]), row[1]):
            raise PeerLost(
                f"rank {one.origin} sent {one.tensor.dtype} {tuple(one.tensor.shape)} for micro-batch {one.micro} of "
                f"{samples} samples, each {row[1]} {row[0]}. Activations of all samples have to have one shape"
            )
        into[one.micro] = one.tensor
        direction = Direction.FORWARD if forward and not self._place.last else Direction.BACKWARD
        self.pool.add(direction, one.micro, samples)
        self.wake()

    # --- StageWork

    def header(self, task: Task) -> dict[str, Any]:
        asked = self._pass_of(task)
        return {
            "direction": asked.direction.value,
            "step": asked.step,
            "attempt": self._key.attempt,
            "draws": asked.draws,
            "bfloat16": asked.bfloat16,
            "stage": [self._place.stage, self._place.stages, *self._layers],
        }

    def given(self, task: Task) -> list[torch.Tensor]:
        rows = slice(task.begin, task.end)
        numbers = torch.tensor(self._micros[task.micro][rows], dtype=torch.int64)
        inputs = [numbers] if self._place.first else [self._inputs[task.micro][rows]]
        if task.direction is Direction.FORWARD:
            return inputs
        if not self._place.last:
            return [*inputs, self._gradients[task.micro][rows]]
        return inputs if self._place.first else [*inputs, numbers]

    def wanted(self, task: Task) -> Sequence[Wanted]:
        if task.direction is Direction.FORWARD:
            assert self._row_out is not None
            return [_rows(task.samples, self._row_out)]
        found: list[Wanted] = [((self._passes.size,), torch.float32)]
        if self._place.last:
            found.append(((1,), torch.float32))
        if self._row_in is not None:
            found.append(_rows(task.samples, self._row_in))
        return found

    def of_what_trains(self, task: Task, answer: list[torch.Tensor]) -> list[torch.Tensor]:
        if task.direction is Direction.FORWARD:
            return answer
        return [self._passes.without_frozen(answer[0]), *answer[1:]]

    def compute(self, task: Task) -> list[torch.Tensor]:
        return self._computed(task, own=False)

    def compute_own(self, task: Task) -> list[torch.Tensor]:
        """One that the server itself has: activations are kept for their backward pass."""
        return self._computed(task, own=True)

    def _computed(self, task: Task, *, own: bool) -> list[torch.Tensor]:
        """Nothing for a task of an attempt that is over."""
        with self.changed:
            if not self.pool.knows(task):
                return []
            self._passes.begin(*self._key)
            made_here = own and task.made_here
            asked, given = replace(self._pass_of(task), made_here=made_here), self.given(task)
        return self._passes.compute(asked, given[made_here:], keep=own)

    def take(self, client: str, task: Task, answer: Sequence[torch.Tensor]) -> None:
        rows, micro, place = slice(task.begin, task.end), task.micro, self._place
        if task.direction is Direction.FORWARD:
            self._fill(self._outputs, micro, rows, self._row_out, answer[0])
            if self.pool.done(Direction.FORWARD, micro):
                self._pass_on(StepPurpose.FORWARD, micro, self._outputs[micro])
            return
        self.sum_P += answer[0]
        self.loss += float(answer[1]) if place.last else 0.0
        self.samples += task.samples
        self.helped += task.samples if client != SELF else 0
        if self._row_in is not None:
            self._fill(self._input_gradients, micro, rows, self._row_in, answer[-1])
            if self.pool.done(Direction.BACKWARD, micro):
                self._pass_on(StepPurpose.BACKWARD, micro, self._input_gradients[micro])
        self._say_if_done()

    def weights(self) -> torch.Tensor:
        return self._passes.weights()

    def begin_again(self) -> None:
        """Begin the batch again on all stages of the pipeline, unless others may have made their update by now."""
        if self._own_done and self._mates:
            return
        self._tell(f"step {self._key.step} begins again: something counted in it that may be wrong", True)
        self._key = Key(self._key.step, self._key.attempt + 1)
        if self._counted:
            self._micros, self._counted = [*self._micros, self._counted], []
        self._tell_mates(StepPurpose.REDO)
        self._open()
        self.changed.notify_all()

    # --- parts of a step

    def _open(self, *, keep_counted: bool = False) -> None:
        """The pool of this attempt. keep_counted: what counted before still does."""
        self.pool.begin_step(same=keep_counted)
        if not keep_counted:
            self.sum_P.fill_(UNREACHED)
            self.loss, self.samples, self.helped = 0.0, 0, 0
        self._own_done = False
        self._done.clear()
        for one in (self._inputs, self._outputs, self._gradients, self._input_gradients):
            one.clear()
        if self._place.first:
            direction = Direction.BACKWARD if self._place.last else Direction.FORWARD
            for micro, numbers in enumerate(self._micros):
                self.pool.add(direction, micro, len(numbers))
        self._say_if_done()
        self.wake()

    def _say_if_done(self) -> None:
        micros = range(len(self._micros))
        if not self._own_done and all(self.pool.done(Direction.BACKWARD, micro) for micro in micros):
            self._own_done = True
            self._tell_mates(StepPurpose.DONE)

    def _fill(
        self, into: dict[int, torch.Tensor], micro: int, rows: slice, row: Wanted | None, answer: torch.Tensor
    ) -> None:
        assert row is not None
        if micro not in into:
            shape, dtype = _rows(len(self._micros[micro]), row)
            into[micro] = torch.empty(shape, dtype=dtype)
        if answer.shape[1:] != into[micro].shape[1:] or answer.dtype != into[micro].dtype:
            raise BadInput(
                f"a stage gave {answer.dtype} {tuple(answer.shape)} where another sample's was {row[1]} {row[0]}. "
                "Activations of all samples have to have one shape: pad them alike"
            )
        into[micro][rows] = answer

    def _pass_on(self, purpose: StepPurpose, micro: int, tensor: torch.Tensor) -> None:
        to = self._place.rank + (1 if purpose is StepPurpose.FORWARD else -1)
        self._say(to, micro, packed(purpose, tensor))

    def _tell_mates(self, purpose: StepPurpose) -> None:
        for one in self._mates:
            self._say(one, 0, bytes([purpose]))

    def _say(self, to: int, micro: int, payload: bytes | bytearray) -> None:
        try:
            self._send(to, *self._key, micro, memoryview(payload))
        except PeerLost as error:
            self.fail(str(error))

    def _pass_of(self, task: Task) -> StagePass:
        stage = self._place.stage, self._place.stages
        draws = self._micros[task.micro][task.begin] * stage[1] + stage[0]
        return StagePass(
            task.direction,
            self._key.step,
            task.micro,
            task.begin,
            task.end,
            draws,
            made_here=task.made_here,
            bfloat16=self._bfloat16,
        )


def _rows(samples: int, row: Wanted) -> Wanted:
    return (samples, *row[0]), row[1]
