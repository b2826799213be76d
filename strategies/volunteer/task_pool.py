"""The task pool of a pipeline's stage: who computes which samples, and that each one's answer counts exactly once.

The frontal and backward servers' lists of the volunteer pipelines (ICLR 2025 submission, section 3.2). Events in, what
to do out: no socket, no clock, no tensor; time is an argument. A client is whoever computes, the server itself too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.errors import BadInput
from atoll.strategies.volunteer.answer_times import FIRST_S, AnswerTimes
from atoll.strategies.volunteer.tasks import Made, Refusal, Task

MAX_CLIENTS: Final = 1_024
MAX_SAMPLES: Final = 65_536
"""Most samples of a micro-batch."""
MOST_OPEN: Final = 2
"""Tasks of one client: one that it computes, one that is on its way."""
MOST_UNANSWERED: Final = 3
"""Deadlines in a row that a client lets pass without a word: it takes and does not give."""
LEAST_PART: Final = 1 / 8
"""Smallest task, as a share of a client's part of a micro-batch: each answer carries a gradient."""
MOST_REFUSED: Final = 32
"""Messages of one client that were refused; more are a flood."""

_WAITING, _DONE = 0, -1  # a sample's holder; else the number of a task
_NO_FAULT: Final = {Refusal.DONE, Refusal.OLD_STEP}


@dataclass(slots=True)
class _Client:
    power: float
    times: dict[Direction, AnswerTimes] = field(default_factory=lambda: dict.fromkeys(Direction, AnswerTimes()))
    open: set[int] = field(default_factory=set)
    owing: set[int] = field(default_factory=set)  # sent and not answered, of whatever step: late is no fault
    answered_s: float = 0.0  # when it last did
    unanswered: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _SentTask:
    task: Task
    client: str
    sent_s: float
    overdue_s: float  # when its answer is late for the client, from when on others may compute it too
    deadline_s: float


@dataclass(slots=True)
class _Micro:
    """holder: of each sample, the task that has it. made: of a forward pass, what counted; of a backward pass that it
    was before, likewise."""

    holder: list[int]
    made: list[Made]


class TaskPool:
    """Pool of one stage's tasks. They belong to one step: later answers are ignored."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        """Answers that counted, by client."""
        self.refused: Counter[Refusal] = Counter()
        self.returned = 0
        """Tasks that went back to the pool: their clients left, did not answer in time, or answered something wrong."""
        self.out: dict[str, str] = {}
        """Clients that get no tasks any more, and why."""
        self.helped: set[str] = set()
        """Whose answers counted in this step."""
        self._clients: dict[str, _Client] = {}
        self._silent: dict[str, _Client] = {}  # let a deadline pass and said nothing since
        self._micros: dict[tuple[Direction, int], _Micro] = {}
        self._sent: dict[int, _SentTask] = {}  # of this step, answered or not
        self._answered: set[int] = set()
        self._reclaimed: set[int] = set()
        self._next = 1

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self._clients)

    @property
    def late(self) -> int:
        """Answers that were dropped because others had been faster, or the step was over."""
        return self.refused[Refusal.DONE] + self.refused[Refusal.OLD_STEP]

    @property
    def per_power(self) -> float:
        """Samples a second that a client of power 1 computes, through all directions; 0 where nothing was learned."""
        sum_rate = sum_power = 0.0
        for client in self._clients.values():
            rates = [one.rate for one in client.times.values() if one.rate is not None]
            if rates:
                sum_rate += 1 / sum(1 / rate for rate in rates)
                sum_power += client.power
        return sum_rate / sum_power if sum_power else 0.0

    def begin_step(self, *, same: bool = False) -> None:
        """Forget the step before: tasks that are still open are no client's any more. Whose tasks others had to compute
        may be gone: it is given none until it answers or joins again. same: what counted before is still of it."""
        for name, client in list(self._clients.items()):
            if overdue := client.open & self._reclaimed:
                self.returned += len(overdue)
                self._silence(name)
        self._reclaimed.clear()
        self._micros.clear()
        self._sent.clear()
        self._answered.clear()
        if not same:
            self.helped.clear()
        for client in (*self._clients.values(), *self._silent.values()):
            client.open.clear()

    def join(self, client: str, power: float) -> str | None:
        """A client announces itself. power: any unit, the same for all; until its answers say more. Returns why not."""
        if client in self.out:
            return self.out[client]
        if not 0 < power < float("inf"):
            return f"a power of {power} is no power: give one above 0"
        if client not in self._clients and len(self._clients) >= MAX_CLIENTS:
            return f"{MAX_CLIENTS} clients are as many as a stage has"
        if client not in self._clients:
            self._clients[client] = self._silent.pop(client) if client in self._silent else _Client(power)
        return None

    def leave(self, client: str) -> None:
        """Remove a client; its unanswered samples return to the pool at once."""
        gone = self._clients.pop(client, None)
        self._silent.pop(client, None)
        for micro in self._micros.values():
            micro.made[:] = [replace(one, client=None) if one.client == client else one for one in micro.made]
        for number in sorted(gone.open) if gone is not None else ():
            self.returned += 1
            self._give_back(number)

    def shut_out(self, client: str, why: str) -> None:
        """Remove a client and refuse it from now on."""
        self.leave(client)
        if len(self.out) < 4 * MAX_CLIENTS:
            self.out[client] = why

    def add(self, direction: Direction, micro: int, samples: int) -> None:
        """A micro-batch to compute. Raises BadInput for one that is there already, or too large."""
        if (direction, micro) in self._micros or not 0 < samples <= MAX_SAMPLES:
            raise BadInput(f"micro-batch {micro} {direction.value} of {samples} samples is there already or too large")
        before = self._micros.get((Direction.FORWARD, micro))
        self._micros[direction, micro] = _Micro([_WAITING] * samples, list(before.made) if before is not None else [])

    def ask(self, client: str, now_s: float, travel_s: float = 0.0) -> Task | None:
        """A client wants a task: the oldest samples that nobody has, backward ones first (they free memory); of these
        first what the client made. So many of a micro-batch as its part of all clients' rates is, and no more than its
        part of all that is left, less what it has already: so all are done at the same time. Who has a task gets none
        that is too small for an answer.

        travel_s: so much longer it is waited for, because of its link."""
        if client not in self._clients:
            self._refuse(client, Refusal.STRANGER)
            return None
        here = self._clients[client]
        if len(here.open) >= MOST_OPEN:
            return None
        for direction in (Direction.BACKWARD, Direction.FORWARD):
            for micro in sorted(number for way, number in self._micros if way is direction):
                found = self._cut(client, direction, micro, now_s)
                if found is None:
                    continue
                task = Task(self._next, micro, direction, *found)
                self._next += 1
                due_s = (self._sent[one].deadline_s for one in here.open)
                begins_s = max([now_s, *(one for one in due_s if one < math.inf)])
                wait_s = self._wait_s(here, direction, task.samples)
                deadline_s, taking_s = begins_s + wait_s + travel_s, wait_s
                if here.times[direction].rate is not None or not travel_s:
                    taking_s = here.times[direction].usual_s(task.samples * len(here.open) + task.samples)
                self._sent[task.number] = _SentTask(task, client, now_s, now_s + taking_s, deadline_s)
                here.open.add(task.number)
                here.owing = {*sorted(here.owing)[-MOST_REFUSED:], task.number}
                for sample in range(task.begin, task.end):
                    self._micros[direction, micro].holder[sample] = task.number
                return task
        return None

    def sent(self, client: str, number: int) -> Task | None:
        """The task that a client was given in this step, whatever became of it since."""
        found = self._sent.get(number)
        return found.task if found is not None and found.client == client else None

    def knows(self, task: Task) -> bool:
        """Return True if the task was given to a client in this step."""
        sent = self._sent.get(task.number)
        return sent is not None and sent.task is task

    def hold(self, client: str, number: int, now_s: float) -> Task | Refusal:
        """An answer came that is looked at before it is given to `answer`: from now on it has no deadline. Returns its
        task, or why it will not count."""
        if client in self._silent:
            self._clients[client] = self._silent.pop(client)
        sent = self._sent.get(number)
        if sent is None or sent.client != client or client not in self._clients or number in self._answered:
            return self.answer(client, number, now_s)
        if sent.deadline_s == math.inf:
            return self._refuse(client, Refusal.TWICE)
        self._sent[number] = replace(sent, deadline_s=math.inf, overdue_s=math.inf)
        return sent.task

    def answer(self, client: str, number: int, now_s: float, *, fits: bool = True) -> Task | Refusal:
        """An answer came: the task that it is of, where it counts; else why it does not. All of its samples count, or
        none: gradients are sums. fits: its content is what the task asked for."""
        if client in self._silent:
            self._clients[client] = self._silent.pop(client)
        if client not in self._clients:
            return self._refuse(client, Refusal.STRANGER)
        here, sent = self._clients[client], self._sent.get(number)
        late = number in here.owing
        if late:  # of an old step too: it takes tasks and does give
            here.unanswered = 0
        here.owing.discard(number)
        if sent is None:
            return self._refuse(client, Refusal.OLD_STEP if late else Refusal.UNKNOWN)
        if sent.client != client:
            return self._refuse(client, Refusal.ANOTHERS)
        if number in self._answered:
            return self._refuse(client, Refusal.TWICE)
        self._answered.add(number)
        begun_s, here.answered_s, here.unanswered = max(sent.sent_s, here.answered_s), now_s, 0
        task, micro = sent.task, self._micros[sent.task.direction, sent.task.micro]
        done = _DONE in micro.holder[task.begin : task.end]
        if done or not fits:
            self.returned += not done
            self._give_back(number)
            return self._refuse(client, Refusal.DONE if done else Refusal.WRONG)
        here.times[task.direction] = here.times[task.direction].learned(now_s - begun_s, task.samples)
        here.open.discard(number)
        here.refused = max(0, here.refused - 1)
        for sample in range(task.begin, task.end):
            micro.holder[sample] = _DONE
        if task.direction is Direction.FORWARD:
            micro.made.append(Made(client, task.begin, task.end))
        self.counted[client] += 1
        self.helped.add(client)
        return task

    def reclaim(self, now_s: float) -> bool:
        """Free the samples of the most overdue task for an idle client. The first client keeps the task, and the
        first answer counts. Return False if no task is overdue."""
        found = [sent for number, sent in self._sent.items() if sent.overdue_s <= now_s and self._is_open(number)]
        if not found:
            return False
        sent = min(found, key=lambda one: one.overdue_s)
        self._sent[sent.task.number] = replace(sent, overdue_s=math.inf)
        self._reclaimed.add(sent.task.number)
        self._free(sent.task)
        return True

    def next_overdue_s(self) -> float | None:
        return min((sent.overdue_s for number, sent in self._sent.items() if self._is_open(number)), default=None)

    def malformed(self, client: str) -> None:
        """A message of this client's could not be read."""
        self._refuse(client, Refusal.WRONG)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Clients that let a deadline pass: all that they have goes back to the pool, and they are given nothing until
        they answer or join again. A late answer counts where nobody was faster."""
        late = {
            sent.client for number, sent in self._sent.items() if sent.deadline_s <= now_s and self._is_open(number)
        }
        for client in sorted(late):
            here = self._clients[client]
            here.unanswered += 1
            for number in sorted(here.open):
                self.returned += 1
                self._give_back(number)
            self._silence(client)
            if here.unanswered >= MOST_UNANSWERED:
                self.shut_out(client, f"it took tasks and let {here.unanswered} deadlines pass without an answer")
        return tuple(sorted(late))

    def done(self, direction: Direction, micro: int) -> bool:
        """Return True if every sample of a micro-batch has its answer."""
        found = self._micros.get((direction, micro))
        return found is not None and all(one == _DONE for one in found.holder)

    def done_samples(self, direction: Direction, micro: int) -> list[int]:
        """Return the places of a micro-batch's answered samples."""
        found = self._micros.get((direction, micro))
        return [place for place, one in enumerate(found.holder) if one == _DONE] if found is not None else []

    def _cut(self, client: str, direction: Direction, micro: int, now_s: float) -> tuple[int, int, bool] | None:
        """(begin, end, made here) of what the client gets: the oldest samples that nobody has."""
        found = self._micros[direction, micro]
        if direction is Direction.BACKWARD and found.made:
            return self._of_made(client, found)
        if _WAITING not in found.holder:
            return None
        here = {name: one for name, one in self._clients.items() if name == client or not one.open & self._reclaimed}
        rates = {name: self._rate(one, direction) for name, one in here.items()}
        share = rates[client] / sum(rates.values())
        part = max(1, round(share * len(found.holder)))
        open_ = {name: self._open_samples(here[name], rate, now_s) for name, rate in rates.items()}
        waiting = sum(each.holder.count(_WAITING) for (way, _), each in self._micros.items() if way is direction)
        balanced = round(share * (waiting + sum(open_.values())) - open_[client])
        least = part * LEAST_PART
        if balanced < least and here[client].open:
            return None
        begin = end = found.holder.index(_WAITING)
        most = max(1, min(part, max(balanced, math.ceil(least))))
        while end < len(found.holder) and found.holder[end] == _WAITING:
            end += 1
        return begin, end if end - begin <= most + least else begin + most, False

    def _open_samples(self, client: _Client, rate: float, now_s: float) -> float:
        """Estimate the samples that a client has not computed yet, by its rate."""
        sent = [self._sent[number] for number in client.open]
        if not sent:
            return 0.0
        begun_s = max(client.answered_s, min(one.sent_s for one in sent))
        return max(0.0, sum(one.task.samples for one in sent) - rate * (now_s - begun_s))

    def _of_made(self, client: str, found: _Micro) -> tuple[int, int, bool] | None:
        """The backward pass of a forward task, whole, so that whoever computes it draws the same random numbers: first
        of the client's own, then of who is not there, then of anybody."""
        waiting = [one for one in found.made if found.holder[one.begin] == _WAITING]
        if not waiting:
            return None

        def foreign(one: Made) -> tuple[int, int]:
            return 0 if one.client == client else 1 if one.client not in self._clients else 2, one.begin

        chosen = min(waiting, key=foreign)
        return chosen.begin, chosen.end, chosen.client == client

    def _rate(self, client: _Client, direction: Direction) -> float:
        """Samples a second, learned; of a new client by its power, as the others' rates are to theirs."""
        rate = client.times[direction].rate
        if rate is not None:
            return rate
        others = [(one.times[direction].rate, one.power) for one in self._clients.values()]
        known = sorted(each / power for each, power in others if each is not None)
        return client.power * (known[len(known) // 2] if known else 1.0)

    def _wait_s(self, client: _Client, direction: Direction, samples: int) -> float:
        """Return the deadline of a task; for a new client twice the slowest known one's."""
        if client.times[direction].rate is not None:
            return client.times[direction].wait_s(samples)
        known = [one.times[direction] for one in self._clients.values() if one.times[direction].rate is not None]
        return 2 * max(one.wait_s(samples) for one in known) if known else FIRST_S

    def _is_open(self, number: int) -> bool:
        client = self._clients.get(self._sent[number].client)
        return client is not None and number in client.open

    def _give_back(self, number: int) -> None:
        sent = self._sent[number]
        self._free(sent.task)
        if (client := self._clients.get(sent.client)) is not None:
            client.open.discard(number)

    def _silence(self, client: str) -> None:
        self._silent[client] = self._clients.pop(client)
        while len(self._silent) > MAX_CLIENTS:
            del self._silent[next(iter(self._silent))]

    def _free(self, task: Task) -> None:
        """Free the samples of a task that no other client has."""
        holder = self._micros[task.direction, task.micro].holder
        for sample in range(task.begin, task.end):
            if holder[sample] == task.number:
                holder[sample] = _WAITING

    def _refuse(self, client: str, why: Refusal) -> Refusal:
        self.refused[why] += 1
        if why not in _NO_FAULT and (here := self._clients.get(client)) is not None:
            here.refused += 1
            if here.refused > MOST_REFUSED:
                self.shut_out(client, f"{here.refused} of its messages were refused, the last one as {why}")
        return why
