"""The server of a stage as volunteers see it: hands out its tasks, checks what comes back, counts each sample once.

It has no thread: one of its owner's calls `receive`, and one that computes calls `check`; it may be the same."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import zmq

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.pipeline.wire import DTYPES
from atoll.agent.runtime.rounding import Form, coarse, fine
from atoll.errors import BadInput
from atoll.jobs.job_spec import MAX_WORKERS
from atoll.strategies.volunteer.checks import TOLERANCE, Comparisons, NormBound, Wanted, difference, of_content
from atoll.strategies.volunteer.link_use import LinkUse, decide
from atoll.strategies.volunteer.messages import MAX_TENSOR_BYTES, Server, listed, number, read, written
from atoll.strategies.volunteer.task_pool import MAX_CLIENTS, MOST_OPEN, TaskPool
from atoll.strategies.volunteer.tasks import Refusal, Task
from atoll.strategies.volunteer.weights_line import WeightsLine
from atoll.telemetry.telemetry_limits import MAX_LINKS, WAITS
from atoll.v1.common_pb2 import LinkSample

NOTHING: Final = -1
"""The version of a client without weights."""
MAX_USES: Final = 4 * MAX_CLIENTS
SELF: Final = "server"
"""Name of the server as a client of its own pool; names of volunteers have a '/'."""
MAX_NAME: Final = 80
MAX_POWER: Final = 1e6
MOST_PROBES: Final = 256
"""Most probes of one volunteer in a run: their content is sent back."""
MOST_PROBED: Final = 1 << 17
"""Bytes."""
MOST_AT_ONCE: Final = 256
"""Messages that are read before anything else is done again."""


class StageWork(Protocol):
    """Source of a stage's tasks. Tensors are on the CPU."""

    def header(self, task: Task) -> dict[str, Any]:
        """Return a task's description, beside its samples and the location of the weights."""

    def given(self, task: Task) -> list[torch.Tensor]:
        """Return a task's inputs, beside the weights."""

    def wanted(self, task: Task) -> Sequence[Wanted]:
        """Return the expected form of each tensor of its answer."""

    def of_what_trains(self, task: Task, answer: list[torch.Tensor]) -> list[torch.Tensor]:
        """The part of a volunteer's answer that is wanted. A volunteer does not know what was frozen since."""

    def compute(self, task: Task) -> list[torch.Tensor]:
        """The server's own answer."""

    def take(self, client: str, task: Task, answer: Sequence[torch.Tensor]) -> None:
        """Add an accepted answer."""

    def weights(self) -> torch.Tensor:
        """[P], float32."""

    def begin_again(self) -> None:
        """Something counted in this step that may be wrong."""


@dataclass(frozen=True, slots=True)
class _Unchecked:
    client: str
    task: Task
    answer: list[torch.Tensor]
    norm: float
    received_s: float


class TaskServer:
    """`pool`, and what StageWork is asked for but `compute`, are used under `changed`, which is told of what counts."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        work: StageWork,
        *,
        recognises: Callable[[str, str], bool],
        tell: Callable[[str, bool], None],
        power: float = 1.0,
        most_bytes: int = MAX_TENSOR_BYTES,
        model_bytes: int = 0,
        coarsest: Form = "float32",
        device: str = "",
    ) -> None:
        """socket: a ROUTER. recognises: a volunteer's name by its ticket. tell: people, and whether
        something is wrong. power: of the server itself. most_bytes: of a tensor that comes. model_bytes: of the
        weights in float32; 0: too few to look at links. coarsest: that travels on thin ones.
        device: the kind of the server's own, as volunteers name theirs."""
        self.pool = TaskPool()
        self.changed = threading.Condition()
        self.servers: Sequence[Server] = ()
        """Whom volunteers could help, all ranks of the run."""
        self.version = 0
        """Of the weights: who has another one is sent them with its next task."""
        self._socket, self._work = socket, work
        self._recognises, self._tell, self._most_bytes = recognises, tell, most_bytes
        self._model_bytes, self._coarsest, self._device = model_bytes, coarsest, device
        self._devices: dict[str, str] = {}  # kinds of the volunteers', by name
        self._bounds = {direction: NormBound() for direction in Direction}
        self._comparisons = Comparisons(random.Random(time.time_ns()))
        self._names: dict[bytes, str] = {}
        self._versions: dict[bytes, int] = {}
        self._uses: dict[str, LinkUse] = {}  # of who ever helped
        self._probes: Counter[str] = Counter()  # of names with a ticket
        self._lines: dict[Form, WeightsLine] = {}
        self._asking: deque[bytes] = deque()
        self._unchecked: deque[_Unchecked] = deque()  # at most MOST_OPEN of a client
        self._malformed: set[str] = set()  # whose first malformed message was told of
        self._out = 0  # of those that were shut out, so many were told
        self._closed = ""  # why nobody may help any more
        self.pool.join(SELF, power)

    @property
    def volunteers(self) -> int:
        """Number of volunteers that can get a task."""
        return sum(client != SELF for client in self.pool.clients)

    @property
    def waiting(self) -> int:
        """Volunteers that were told to wait."""
        return sum(name in self._uses and self._rests(name) for name in self._names.values())

    def links(self) -> list[LinkSample]:
        """Return the links of volunteers that ever helped; `form` is empty where they would be given no task."""
        with self.changed:
            there = set(self.pool.clients)
            return [
                LinkSample(
                    peer=MAX_WORKERS + use.number,
                    sent_bytes=use.to_bytes,
                    received_bytes=use.from_bytes,
                    volunteer=name,
                    wait_share=use.wait_share,
                    form=WAITS if self._rests(name) else use.seen.form if name in there else "",
                    differs=use.differs,
                )
                for name, use in list(self._uses.items())[:MAX_LINKS]
            ]

    def receive(self) -> None:
        """Receive messages, return overdue samples to the pool, and give tasks to clients that asked."""
        for _ in range(MOST_AT_ONCE):
            if not self._socket.poll(0):
                break
            frames = self._socket.recv_multipart()
            with self.changed:
                self._hear(frames)
        with self.changed:
            if self.pool.expire(time.monotonic()):
                self.changed.notify_all()
            self._shut_out()
            self._hand_out()

    @property
    def unchecked(self) -> bool:
        """Return True if `check` has something to do."""
        return bool(self._unchecked)

    def check(self) -> bool:
        """Compute one of the answers again that are to be compared; it counts, or its client is shut out. Returns
        whether there was one."""
        with self.changed:
            if not self._unchecked:
                return False
            found = self._unchecked.popleft()
            if self.pool.sent(found.client, found.task.number) is not found.task:
                return True  # of a step that is over
        own = self._work.compute(found.task)
        with self.changed:
            if self.pool.sent(found.client, found.task.number) is found.task:
                self._compared(found, difference(found.answer, own))
        return True

    def count(self, client: str, number_: int, answer: Sequence[torch.Tensor], now_s: float | None = None) -> None:
        """An answer that is sound counts, where the pool says so. now_s: when it came; None: now."""
        with self.changed:
            task = self.pool.answer(client, number_, time.monotonic() if now_s is None else now_s)
            if not isinstance(task, Refusal):
                self._work.take(client, task, answer)
            self.changed.notify_all()

    def refuse_all(self, why: str) -> None:
        """Shut out whoever helps, and whoever comes. Used under `changed`."""
        self._closed = why
        for client in [one for one in self.pool.clients if one != SELF]:
            self.pool.shut_out(client, why)

    def end(self) -> None:
        """Tell the volunteers that nothing follows."""
        for sender in self._names:
            self._send(sender, {"kind": "out"})

    def _hear(self, frames: list[bytes]) -> None:
        sender = frames[0]
        client = self._names.get(sender)
        size_bytes = sum(map(len, frames))
        try:
            header, tensors = read(frames[1:], self._most_bytes)
            match header.get("kind"):
                case "hello":
                    self._greet(sender, header)
                case "probe":
                    self._echo(sender, header, tensors)
                case _ if client is not None and self._rests(client):
                    pass
                case "answer" if client is not None:
                    form = self._arrived(client, header, size_bytes)
                    if header.get("drew") and self._devices[client] != self._device:
                        self._refuse_draws(client)
                    else:
                        self._answered(client, number(header, "number"), tensors, form)
                    self._judge(sender, client)
                case _ if client is None or client not in self.pool.clients:
                    self._send(sender, {"kind": "again"})
                case "ask" if self._asking.count(sender) < MOST_OPEN:
                    self._asking.append(sender)
        except BadInput as error:
            who = client or "a stranger"
            if who not in self._malformed:
                self._malformed.add(who)
                self._tell(f"{who}: {error}", True)
            if client is not None:
                self.pool.malformed(client)

    def _name_of(self, sender: bytes, header: dict[str, Any]) -> str:
        name, shown = header.get("name"), header.get("ticket")
        if not isinstance(name, str) or not isinstance(shown, str):
            raise BadInput("a greeting lacks name or ticket")
        if name == SELF or len(name) > MAX_NAME or not self._recognises(name, shown):
            self._send(sender, {"kind": "out", "why": "its ticket is none of this run"})
            raise BadInput(f"{name[:MAX_NAME]!r} has no ticket of this run")
        return name

    def _echo(self, sender: bytes, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Answer a probe, by which volunteers measure their distance from this rank."""
        name = self._name_of(sender, header)
        self._probes[name] += 1
        if self._probes[name] > MOST_PROBES or sum(one.nbytes for one in tensors) > MOST_PROBED:
            raise BadInput("it measures more than is taken")
        self._send(sender, {"kind": "echo"}, [listed(self.servers)] if header.get("servers") else tensors)

    def _greet(self, sender: bytes, header: dict[str, Any]) -> None:
        name, power = self._name_of(sender, header), header.get("power")
        if not isinstance(power, int | float) or not 0 < power <= MAX_POWER:  # "not", so that NaN is refused too
            raise BadInput(f"a greeting has a power that is none of 0 to {MAX_POWER:g}")
        self._devices[name] = str(header.get("device"))[:MAX_NAME]
        for other in [one for one, known in self._names.items() if known == name and one != sender]:
            del self._names[other], self._versions[other]  # the same device, started again
            self.pool.leave(name)
            if name in self._uses:
                self._uses[name].start_again()
        if self._closed:
            self._send(sender, {"kind": "out", "why": self._closed})
            return
        if name in self._uses and self._rests(name):
            self._names[sender] = name
            self._versions.setdefault(sender, NOTHING)
            return
        if (why := self.pool.join(name, float(power))) is not None:
            self._send(sender, {"kind": "out", "why": why[:1000]})
            return
        if sender not in self._names:
            self._tell(f"{name} helps", False)
        self._names[sender] = name
        self._versions.setdefault(sender, NOTHING)
        if name not in self._uses and len(self._uses) < MAX_USES:
            self._uses[name] = LinkUse(len(self._uses))

    def _refuse_draws(self, client: str) -> None:
        """A pass with dropout can neither be compared nor be computed again on another kind of device."""
        self.pool.shut_out(
            client,
            f"the model draws random numbers (dropout), and its {self._devices[client]} draws other ones than this "
            f"rank's {self._device} for the same seed. Let volunteers of the rank's kind help, or use no dropout",
        )

    def _shut_out(self) -> None:
        """Tell who was, and them: by whatever limit."""
        for name, why in list(self.pool.out.items())[self._out :]:
            self._out += 1
            self._tell(f"{name} is shut out: {why}", True)
            for sender in [one for one, known in self._names.items() if known == name]:
                self._send(sender, {"kind": "out", "why": why[:1000]})

    def _hand_out(self) -> None:
        for _ in range(len(self._asking)):
            sender = self._asking.popleft()
            client = self._names.get(sender)
            if client is None or client not in self.pool.clients:
                continue
            use, now_s = self._uses.get(client), time.monotonic()
            task = self.pool.ask(client, now_s, use.travel_s(self._model_bytes) if use is not None else 0.0)
            if task is None:
                self._asking.append(sender)
                continue
            self._give(sender, task, use, now_s)

    def _give(self, sender: bytes, task: Task, use: LinkUse | None, now_s: float) -> None:
        given = self._work.given(task)[task.made_here :]
        form: Form = use.seen.form if use is not None else "float32"
        weights: list[torch.Tensor] = []
        changes = 0
        if (has := self._versions[sender]) != self.version:
            weights, changes = self._line(form).to(has, self.version, self._work.weights)
            self._versions[sender] = self.version
        header = {
            "kind": "task",
            "number": task.number,
            "micro": task.micro,
            "begin": task.begin,
            "end": task.end,
            "made_here": task.made_here,
            "form": form,
            "leading": len(weights),
            "changes": changes,
            "given": [[DTYPES.index(one.dtype), *one.shape] for one in given],
            **self._work.header(task),
        }
        size_bytes = self._send(sender, header, [*weights, *(piece for one in given for piece in coarse(one, form))])
        if use is not None:
            use.sent(task.number, size_bytes, form, now_s, all_weights=bool(weights) and not changes)

    def _line(self, form: Form) -> WeightsLine:
        return self._lines.setdefault(form, WeightsLine(form))

    def _rests(self, name: str) -> bool:
        """Return True if the volunteer is paused."""
        use = self._uses.get(name)
        return use is not None and time.monotonic() < use.rests_until_s

    def _arrived(self, client: str, header: dict[str, Any], size_bytes: int) -> Form:
        """An answer, whether it counts or not. Returns what it came as."""
        computed_s = header.get("computed_s")
        told_s = float(computed_s) if isinstance(computed_s, int | float) else math.nan
        use = self._uses.get(client)
        return use.arrived(number(header, "number"), size_bytes, told_s, time.monotonic()) if use else "float32"

    def _judge(self, sender: bytes, client: str) -> None:
        """Act on the measurements of a volunteer's link."""
        use, now_s = self._uses.get(client), time.monotonic()
        verdict = decide(use.seen, self._coarsest, self._model_bytes) if use is not None else None
        if use is None or verdict is None or client not in self.pool.clients:
            return
        if verdict.form is not None:
            use.take_form(verdict.form)
            self._versions[sender] = NOTHING
            self._tell(f"{client} has and answers {verdict.form} from now on: {verdict.why}", False)
            return
        rest_s = use.rest(now_s)
        self.pool.leave(client)
        self._tell(f"{client} waits for {rest_s:.0f} s: {verdict.why}", True)
        self._send(sender, {"kind": "wait", "for_s": rest_s, "why": verdict.why})

    def _answered(self, client: str, task_number: int, sent: list[torch.Tensor], form: Form) -> None:
        now_s = time.monotonic()
        task = self.pool.hold(client, task_number, now_s)
        if isinstance(task, Refusal):
            return
        wanted = self._work.wanted(task)
        try:
            answer = fine(sent, wanted, form)
        except BadInput:
            answer = sent
        if of_content(answer, wanted) is not None:
            self.pool.answer(client, task_number, now_s, fits=False)
            return
        answer = self._work.of_what_trains(task, answer)
        norm = float(answer[0].norm()) / task.samples
        bound = self._bounds[task.direction]
        if self._comparisons.due(client) or bound.exceeded(norm):
            self._unchecked.append(_Unchecked(client, task, answer, norm, now_s))
            self.changed.notify_all()
        else:
            bound.learn(norm)
            self.count(client, task_number, answer, now_s)

    def _compared(self, found: _Unchecked, apart: float) -> None:
        """apart: by so much it differs from the server's own."""
        out = self._comparisons.compared(found.client, apart)
        if apart <= TOLERANCE:
            self._bounds[found.task.direction].learn(found.norm)
            if (use := self._uses.get(found.client)) is not None:
                use.differs = max(use.differs, apart)
            self.count(found.client, found.task.number, found.answer, found.received_s)
            return
        self.pool.answer(found.client, found.task.number, found.received_s, fits=False)
        if out is not None:
            helped = found.client in self.pool.helped
            self.pool.shut_out(found.client, out)
            if helped:  # of this step something of it counted
                self._work.begin_again()
        self.changed.notify_all()

    def _send(self, sender: bytes, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> int:
        """Returns bytes."""
        frames = written(header, tensors)
        self._socket.send_multipart([sender, *frames])
        return sum(map(len, frames))
