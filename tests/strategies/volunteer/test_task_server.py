"""A task server on a real socket, and clients that do what they should not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import zmq

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.agent.runtime.rounding import Form, coarse
from atoll.strategies.volunteer.checks import PROBATION, Wanted
from atoll.strategies.volunteer.link_use import JUDGED_BYTES, MEASURED, MEASURED_LONG
from atoll.strategies.volunteer.messages import read, written
from atoll.strategies.volunteer.task_pool import MOST_OPEN, MOST_REFUSED
from atoll.strategies.volunteer.task_server import SELF, TaskServer
from atoll.strategies.volunteer.tasks import Refusal, Task
from atoll.telemetry.telemetry_limits import WAITS

SAMPLES = 64


class Sums:
    """The answer of a task is the sum of its samples' numbers, times others."""

    def __init__(self, entries: int = 3) -> None:
        self.entries = entries
        self.counted: list[tuple[str, int, int]] = []
        self.again = 0

    def header(self, task: Task) -> dict[str, Any]:
        return {"step": 0}

    def given(self, task: Task) -> list[torch.Tensor]:
        return [torch.arange(task.begin, task.end)]

    def wanted(self, task: Task) -> Sequence[Wanted]:
        return [((self.entries,), torch.float32)]

    def of_what_trains(self, task: Task, answer: list[torch.Tensor]) -> list[torch.Tensor]:
        return answer

    def compute(self, task: Task) -> list[torch.Tensor]:
        return [answer_of(torch.arange(task.begin, task.end), self.entries)]

    def take(self, client: str, task: Task, answer: Sequence[torch.Tensor]) -> None:
        self.counted.append((client, task.begin, task.end))

    def weights(self) -> torch.Tensor:
        return torch.zeros(self.entries)

    def begin_again(self) -> None:
        self.again += 1


def answer_of(samples: torch.Tensor, entries: int = 3) -> torch.Tensor:
    return samples.sum() * torch.linspace(0.5, 1.0, entries)


class Rig:
    """A server, and clients that speak by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], coarsest: Form = "float32", entries: int = 3) -> None:
        self._context = context
        self._router = context.socket(zmq.ROUTER)
        self._router.bind("inproc://tasks")
        self.lines: list[zmq.Socket[bytes]] = []
        self.told: list[str] = []
        self.work = Sums(entries)
        self.server = TaskServer(
            self._router,
            self.work,
            recognises=lambda name, shown: shown == f"ticket of {name}",
            tell=lambda text, _: self.told.append(text),
            model_bytes=4 * entries,
            coarsest=coarsest,
            device="A100",
        )
        self.server.pool.begin_step()
        self.server.pool.add(Direction.BACKWARD, 0, SAMPLES)

    def client(self, name: str, shown: str | None = None, device: str = "A100") -> zmq.Socket[bytes]:
        line = self._context.socket(zmq.DEALER)
        line.connect("inproc://tasks")
        self.lines.append(line)
        greeting = {
            "kind": "hello",
            "name": name,
            "ticket": shown or f"ticket of {name}",
            "power": 1.0,
            "device": device,
        }
        self.say(line, greeting)
        return line

    def say(self, line: zmq.Socket[bytes], header: dict[str, Any], *tensors: torch.Tensor) -> None:
        line.send_multipart(written(header, tensors))
        self.server.receive()
        while self.server.check():
            self.server.receive()

    def task(self, line: zmq.Socket[bytes]) -> tuple[int, torch.Tensor]:
        """Ask for one: its number, and its samples."""
        self.say(line, {"kind": "ask"})
        header, tensors = self.heard(line)
        assert header["kind"] == "task"
        return header["number"], tensors[-1]

    def heard(self, line: zmq.Socket[bytes]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        assert line.poll(1000), "the server said nothing"
        return read(line.recv_multipart())

    def answer(
        self, line: zmq.Socket[bytes], number: int, *tensors: torch.Tensor, computed_s: float = 0.0, drew: bool = False
    ) -> None:
        self.say(line, {"kind": "answer", "number": number, "computed_s": computed_s, "drew": drew}, *tensors)

    def close(self) -> None:
        for line in (*self.lines, self._router):
            line.close(linger=0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with zmq.Context() as context:
        made = Rig(context)
        yield made
        made.close()


def test_an_answer_counts_once_and_weights_come_with_the_first_task_of_a_version(rig: Rig) -> None:
    v = rig.client("v")
    rig.say(v, {"kind": "ask"})
    first, tensors = rig.heard(v)
    assert (first["leading"], len(tensors)) == (1, 2)
    rig.answer(v, first["number"], answer_of(tensors[-1]))
    assert rig.work.counted == [("v", first["begin"], first["end"])]
    rig.answer(v, first["number"], answer_of(tensors[-1]))
    assert (len(rig.work.counted), rig.server.pool.refused[Refusal.TWICE]) == (1, 1)
    rig.say(v, {"kind": "ask"})
    assert not rig.heard(v)[0]["leading"]
    assert rig.told == ["v helps"]


@pytest.mark.parametrize("name", ["v", SELF, "n" * 100])
def test_who_has_no_ticket_is_told_to_go_and_gets_nothing(rig: Rig, name: str) -> None:
    stranger = rig.client(name, "ticket of another")
    assert rig.heard(stranger)[0]["kind"] == "out"
    rig.say(stranger, {"kind": "ask"})
    assert rig.heard(stranger)[0]["kind"] == "again"
    rig.answer(stranger, 1, torch.zeros(3))
    assert rig.heard(stranger)[0]["kind"] == "again"
    assert rig.server.volunteers == 0
    assert rig.work.counted == []


Answers = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right: (right[:2],),
        lambda right: (right.double(),),
        lambda right: (right, right),
        lambda right: (),
        lambda right: (right * float("nan"),),
        lambda right: (right * float("inf"),),
    ],
)
def test_answers_that_anybody_can_see_are_wrong_are_refused_and_their_samples_go_to_others(
    rig: Rig, wrong: Answers
) -> None:
    v, w = rig.client("v"), rig.client("w")
    number, samples = rig.task(v)
    rig.answer(v, number, *wrong(answer_of(samples)))
    assert rig.server.pool.refused[Refusal.WRONG] == 1
    assert rig.work.counted == []
    while not rig.server.pool.done(Direction.BACKWARD, 0):
        number, samples = rig.task(w)
        rig.answer(w, number, answer_of(samples))
    places = sorted(place for _, begin, end in rig.work.counted for place in range(begin, end))
    assert places == list(range(SAMPLES))


def test_who_lies_is_shut_out_and_where_it_had_counted_the_step_begins_again(rig: Rig) -> None:
    """1. A volunteer is honest until it is checked seldom, then it lies. 2. Two lies that were found shut it out, by
    name and with figures. 3. What it may have told unseen is in the step, which begins again. 4. It may not come
    back."""
    v = rig.client("v")
    lies = -PROBATION
    while "v" not in rig.server.pool.out:
        lies += 1
        rig.server.pool.begin_step()
        rig.server.pool.add(Direction.BACKWARD, 0, SAMPLES)
        rig.server.pool.helped.add("v")
        number, samples = rig.task(v)
        rig.answer(v, number, answer_of(samples) * (1 if lies <= 0 else -1))
        assert lies < 1000
    assert rig.heard(v)[0]["kind"] == "out"
    assert rig.told[-1].startswith("v is shut out: 2 of its ")
    assert rig.work.again == 1
    back = rig.client("v")
    header, _ = rig.heard(back)
    assert (header["kind"], "of its" in header["why"]) == ("out", True)


def test_nobody_helps_any_more_where_volunteers_lack_what_the_script_wrote(rig: Rig) -> None:
    """1. One helps. 2. The rank finds that its script wrote a buffer, which volunteers are not sent. 3. Who helps and
    who comes are told why, and the rank computes all by itself."""
    there = rig.client("there")
    number, samples = rig.task(there)
    rig.server.refuse_all("the script wrote scale")
    rig.answer(there, number, answer_of(samples))
    assert rig.told[-1] == "there is shut out: the script wrote scale"
    late = rig.client("late")
    for line in (there, late):
        assert rig.heard(line)[0] == {"kind": "out", "why": "the script wrote scale"}
    assert rig.work.counted == []
    assert list(rig.server.pool.clients) == [SELF]


def test_another_kind_of_device_is_shut_out_where_the_model_draws_random_numbers(rig: Rig) -> None:
    """1. A volunteer on another kind of device helps as long as its passes draw nothing. 2. One of the server's kind
    may draw. 3. The other one's first pass with dropout counts for nothing: it had other masks than the server's, so it
    could be neither compared nor computed again. It is shut out by that name, and its samples go to others."""
    other, alike = rig.client("other", device="x86_64 CPU"), rig.client("alike")
    number, samples = rig.task(other)
    rig.answer(other, number, answer_of(samples))
    number, samples = rig.task(alike)
    rig.answer(alike, number, answer_of(samples), drew=True)
    assert [client for client, _, _ in rig.work.counted] == ["other", "alike"]
    number, samples = rig.task(other)
    rig.answer(other, number, answer_of(samples), drew=True)
    assert len(rig.work.counted) == 2
    why = rig.heard(other)[0]["why"]
    assert "draws random numbers (dropout), and its x86_64 CPU draws other ones than this rank's A100" in why
    assert rig.told[-1] == f"other is shut out: {why}"
    while not rig.server.pool.done(Direction.BACKWARD, 0):
        number, samples = rig.task(alike)
        rig.answer(alike, number, answer_of(samples), drew=True)
    places = sorted(place for _, begin, end in rig.work.counted for place in range(begin, end))
    assert places == list(range(SAMPLES))
    assert rig.work.again == 0


def test_a_flood_shuts_its_sender_out_and_others_go_on(rig: Rig) -> None:
    """Of asks only so many wait as it may have tasks; of what is malformed or answers nothing, so many are borne."""
    v, w = rig.client("v"), rig.client("w")
    rig.server.pool.add(Direction.BACKWARD, 1, SAMPLES)
    for _ in range(20):
        rig.say(v, {"kind": "ask"})
    tasks = 0
    while v.poll(0):
        tasks += read(v.recv_multipart())[0]["kind"] == "task"
    assert tasks == MOST_OPEN
    for place in range(MOST_REFUSED + 1):
        v.send_multipart([b"no json"] if place % 2 else written({"kind": "answer", "number": 10**6}, []))
    rig.server.receive()
    assert "of its messages were refused" in rig.server.pool.out["v"]
    assert rig.told[-1].startswith("v is shut out")
    number, samples = rig.task(w)
    rig.answer(w, number, answer_of(samples))
    assert [name for name, *_ in rig.work.counted] == ["w"]


def test_a_device_that_starts_again_gives_its_tasks_back_at_once(rig: Rig) -> None:
    """1. Its process was killed with two tasks. 2. The next one greets: both are in the pool again. 3. The first one's
    late answer is a stranger's."""
    first = rig.client("v")
    rig.server.pool.add(Direction.BACKWARD, 1, SAMPLES)
    numbers = [rig.task(first)[0] for _ in range(MOST_OPEN)]
    assert rig.server.pool.returned == 0
    second = rig.client("v")
    assert rig.server.pool.returned == MOST_OPEN
    number, _ = rig.task(second)
    assert number not in numbers
    rig.answer(first, numbers[0], torch.zeros(3))
    assert rig.heard(first)[0]["kind"] == "again"
    assert rig.work.counted == []


@pytest.mark.parametrize("power", [0, -1.0, 10**400, float("nan"), float("inf"), None, "much"])
def test_a_greeting_without_a_power_is_refused(rig: Rig, power: object) -> None:
    line = rig.client("v")
    rig.say(line, {"kind": "hello", "name": "w", "ticket": "ticket of w", "power": power})
    assert rig.server.volunteers == 1
    assert "a greeting" in rig.told[-1]


def test_a_thin_link_is_given_int8_then_told_to_wait_and_its_tasks_go_to_others() -> None:
    """1. A client says of each answer that computing took no time: all that it took was its link. 2. It has weights and
    answers as int8; the rounding is no lie. 3. It waits: no task, no answer counts, greeting again is in vain, and
    nobody is told to greet again. 4. Its open samples are another's, and each counts once."""
    entries = JUDGED_BYTES // 4
    with zmq.Context() as context:
        rig = Rig(context, "int8", entries)
        try:
            v = rig.client("v")
            forms = []
            while not rig.server.waiting:
                rig.say(v, {"kind": "ask"})
                header, tensors = rig.heard(v)
                forms.append(header["form"])
                rig.answer(v, header["number"], *coarse(answer_of(tensors[-1], entries), header["form"]))
                if rig.server.pool.done(Direction.BACKWARD, 0):
                    rig.server.pool.begin_step()
                    rig.server.pool.add(Direction.BACKWARD, 0, SAMPLES)
            assert forms == ["float32"] * MEASURED + ["int8"] * (MEASURED_LONG + 1)  # the first one begins it
            assert rig.heard(v)[0]["kind"] == "wait"
            assert [text.split(":")[0] for text in rig.told] == [
                "v helps", "v has and answers int8 from now on", "v waits for 60 s",
            ]  # fmt: skip
            (link,) = rig.server.links()
            assert (link.volunteer, link.form, rig.server._uses["v"].seen.form) == ("v", WAITS, "int8")
            assert "v" not in rig.server.pool.clients
            assert 1e-4 < link.differs < 0.032
            assert rig.server.pool.out == {}
            counted = len(rig.work.counted)
            rig.say(v, {"kind": "hello", "name": "v", "ticket": "ticket of v", "power": 1.0})
            rig.say(v, {"kind": "ask"})
            rig.answer(v, 1, torch.zeros(entries))
            assert not v.poll(0)
            assert len(rig.work.counted) == counted
            rig.server.pool.begin_step()
            rig.server.pool.add(Direction.BACKWARD, 0, SAMPLES)
            w, begun = rig.client("w"), len(rig.work.counted)
            while not rig.server.pool.done(Direction.BACKWARD, 0):
                number, samples = rig.task(w)
                rig.answer(w, number, answer_of(samples, entries), computed_s=1e6)
            places = sorted(place for _, begin, end in rig.work.counted[begun:] for place in range(begin, end))
            assert places == list(range(SAMPLES))
        finally:
            rig.close()
