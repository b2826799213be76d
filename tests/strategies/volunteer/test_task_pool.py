from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atoll.agent.runtime.pipeline.schedule import Direction
from atoll.errors import BadInput
from atoll.strategies.volunteer.answer_times import FIRST_S
from atoll.strategies.volunteer.task_pool import MAX_CLIENTS, MOST_OPEN, MOST_REFUSED, MOST_UNANSWERED, TaskPool
from atoll.strategies.volunteer.tasks import Made, Refusal, Task

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def pool_of(**powers: float) -> TaskPool:
    pool = TaskPool()
    for client, power in powers.items():
        assert pool.join(client, power) is None
    return pool


def taken(pool: TaskPool, client: str, now_s: float = 0.0) -> Task:
    task = pool.ask(client, now_s)
    assert task is not None
    return task


def next_deadline_s(pool: TaskPool) -> float | None:
    return min((sent.deadline_s for number, sent in pool._sent.items() if pool._is_open(number)), default=None)


def test_a_micro_batch_is_split_by_power_until_answers_say_more() -> None:
    """1. Powers 3 : 1 of 16 samples. 2. The strong one turns out slow: 12 samples in 12 s, the other's 4 in 1 s: the
    next micro-batch is split 1 : 4."""
    pool = pool_of(strong=3.0, weak=1.0)
    pool.add(FORWARD, 0, 16)
    first, second = taken(pool, "strong"), taken(pool, "weak")
    assert (first.samples, second.samples) == (12, 4)
    assert pool.answer("weak", second.number, 1.0) == second
    assert not pool.done(FORWARD, 0)
    assert pool.answer("strong", first.number, 12.0) == first
    assert pool.done(FORWARD, 0)
    pool.add(FORWARD, 1, 20)
    assert (taken(pool, "strong", 12.0).samples, taken(pool, "weak", 12.0).samples) == (4, 16)


def test_all_are_done_at_the_same_time_and_nobody_has_a_few_samples_for_a_task() -> None:
    """1. Two clients of the same power, two micro-batches of 40. One has two tasks ahead, the other is late. 2. Near
    the end each gets no more than brings it to the other's end: the first one, which has 20 samples, gets no third task
    while 20 are left, for they are the other's. 3. A rest of two samples goes along with the task before it."""
    pool = pool_of(ahead=1.0, late=1.0)
    for micro in range(2):
        pool.add(BACKWARD, micro, 40)
    assert [taken(pool, "ahead").samples for _ in range(MOST_OPEN)] == [20, 20]
    assert taken(pool, "late").samples == 20
    first = next(number for number in (1, 2, 3) if (task := pool.sent("ahead", number)) and task.micro == 0)
    assert isinstance(pool.answer("ahead", first, 20.0), Task)
    assert pool.ask("ahead", 20.0) is None
    assert taken(pool, "late", 20.0).samples == 20
    pool = pool_of(a=9.0, b=10.0)
    pool.add(BACKWARD, 0, 42)
    assert (taken(pool, "a").samples, taken(pool, "b").samples) == (20, 22)
    pool.begin_step()
    pool.add(BACKWARD, 0, 42)
    pool.join("c", 1.0)
    assert (taken(pool, "a").samples, taken(pool, "b").samples) == (19, 23)
    assert pool.ask("c", 0.0) is None


def test_gradients_go_to_who_made_the_activations_and_to_others_with_the_input_where_that_one_is_gone() -> None:
    pool = pool_of(a=1.0, b=1.0)
    pool.add(FORWARD, 0, 8)
    for client, task in [(client, taken(pool, client)) for client in ("a", "b")]:
        pool.answer(client, task.number, 1.0)
    assert pool._micros[Direction.FORWARD, 0].made == [Made("a", 0, 4), Made("b", 4, 8)]
    pool.add(BACKWARD, 0, 8)
    own = taken(pool, "b", 1.0)
    assert (own.begin, own.end, own.made_here) == (4, 8, True)
    pool.leave("a")
    orphaned = taken(pool, "b", 1.0)
    assert (orphaned.begin, orphaned.end, orphaned.made_here) == (0, 4, False)


def test_what_is_not_answered_in_time_goes_to_the_next_and_the_first_answer_counts() -> None:
    """1. a is silent past its deadline, b gets its samples. 2. a answers after all, before b: that counts. 3. b's comes
    too late, is dropped and counted. 4. The reverse in the backward pass."""
    pool = pool_of(a=1.0)
    pool.add(FORWARD, 0, 4)
    first = taken(pool, "a")
    assert next_deadline_s(pool) == FIRST_S
    assert pool.expire(FIRST_S - 0.1) == ()
    assert pool.expire(FIRST_S) == ("a",)
    pool.join("b", 1.0)
    again = taken(pool, "b", FIRST_S)
    assert (again.begin, again.end) == (0, 4)  # all of it: who is silent has no share
    assert pool.answer("a", first.number, FIRST_S + 1) == first
    assert pool.done(FORWARD, 0)
    assert pool.answer("b", again.number, FIRST_S + 2) == Refusal.DONE
    assert pool.done(FORWARD, 0)  # what is dropped gives nothing back that another brought
    assert pool.ask("b", FIRST_S + 2) is None
    assert pool.counted == Counter(a=1)
    pool.add(BACKWARD, 0, 4)
    late = taken(pool, "a", FIRST_S + 2)
    assert (late.made_here, pool.expire(FIRST_S + 1000)) == (True, ("a",))
    faster = taken(pool, "b", FIRST_S + 1000)
    assert (faster.begin, faster.end, faster.made_here) == (0, 4, False)
    assert pool.answer("b", faster.number, FIRST_S + 1001) == faster
    assert pool.answer("a", late.number, FIRST_S + 1002) == Refusal.DONE
    assert pool.refused[Refusal.DONE] == 2


def test_answers_to_nothing_twice_and_of_others_are_refused_each_by_its_name() -> None:
    pool = pool_of(a=1.0, b=1.0)
    pool.add(FORWARD, 0, 4)
    task = taken(pool, "a")
    assert pool.answer("c", task.number, 1.0) == Refusal.STRANGER
    assert pool.answer("b", task.number, 1.0) == Refusal.ANOTHERS
    assert pool.answer("a", 999, 1.0) == Refusal.UNKNOWN
    assert pool.answer("a", task.number, 1.0) == task
    assert pool.answer("a", task.number, 1.0) == Refusal.TWICE
    wrong = taken(pool, "b", 1.0)
    assert pool.answer("b", wrong.number, 1.5, fits=False) == Refusal.WRONG
    assert (again := taken(pool, "a", 2.0)).begin == wrong.begin
    pool.begin_step()
    assert pool.answer("a", again.number, 2.5) == Refusal.OLD_STEP
    assert pool.answer("a", again.number, 2.6) == Refusal.UNKNOWN


def test_a_flood_is_bounded_and_shut_out_and_being_late_is_no_flood() -> None:
    """1. Clients have MOST_OPEN tasks at most. 2. One that sends what nobody asked for is out, its tasks go to others,
    it may not come back. 3. One whose step is always over stays. 4. No more than MAX_CLIENTS."""
    pool = pool_of(a=1.0, slow=1.0)
    pool.add(FORWARD, 0, 64)
    pool.add(FORWARD, 1, 64)
    assert [pool.ask("a", 0.0) is not None for _ in range(4)] == [True] * MOST_OPEN + [False] * (4 - MOST_OPEN)
    for _ in range(MOST_REFUSED + 1):
        pool.answer("a", 10**9, 0.0)
    assert "messages were refused, the last one as no such task" in pool.out["a"]
    assert pool.join("a", 1.0) == pool.out["a"]
    assert pool.ask("a", 0.0) is None
    assert taken(pool, "slow").begin == 0
    for step in range(3 * MOST_REFUSED):
        pool.begin_step()
        pool.add(FORWARD, 0, 4)
        late = taken(pool, "slow", step)
        pool.begin_step()
        assert pool.answer("slow", late.number, step) == Refusal.OLD_STEP
    assert "slow" not in pool.out
    for number in range(2 * MAX_CLIENTS):
        pool.join(str(number), 1.0)
    assert len(pool.clients) == MAX_CLIENTS


def test_who_takes_tasks_and_answers_none_is_out() -> None:
    """1. After each deadline it is given nothing until it joins again. 2. After the third it may not."""
    pool = pool_of(a=1.0)
    pool.add(FORWARD, 0, 64)
    for _ in range(MOST_UNANSWERED):
        assert pool.join("b", 1.0) is None
        taken(pool, "b", 0.0)
        assert pool.expire(FIRST_S * 100) == ("b",)
        assert pool.ask("b", FIRST_S * 100) is None
        assert pool.clients == ("a",)
    assert pool.join("b", 1.0) == pool.out["b"] == "it took tasks and let 3 deadlines pass without an answer"
    assert taken(pool, "a").begin == 0


def test_a_deadline_is_learned_of_tasks_and_begins_when_the_one_before_is_due() -> None:
    """Tasks of a second each, and no variation: a deadline nears a second, of a second task at once two."""
    pool = pool_of(a=1.0)
    for micro in range(40):
        pool.add(FORWARD, micro, 8)
        pool.answer("a", taken(pool, "a", micro).number, micro + 1.0)
    pool.add(FORWARD, 40, 8)
    pool.add(FORWARD, 41, 8)
    taken(pool, "a", 100.0)
    assert next_deadline_s(pool) == pytest.approx(101.0, abs=0.01)
    taken(pool, "a", 100.0)
    assert pool.expire(101.5) == ("a",)
    assert next_deadline_s(pool) is None


@pytest.mark.parametrize("samples", [0, -1, 10**6])
def test_a_micro_batch_that_cannot_be_is_refused(samples: int) -> None:
    pool = TaskPool()
    with pytest.raises(BadInput, match="too large"):
        pool.add(FORWARD, 0, samples)
    pool.add(FORWARD, 1, 4)
    with pytest.raises(BadInput, match="there already"):
        pool.add(FORWARD, 1, 4)
    assert pool.join("a", 0.0) is not None
    assert pool.join("a", float("nan")) is not None


NAMES = st.sampled_from("abcde")


class Interleavings(RuleBasedStateMachine):
    """Clients join, die, are late, answer twice and for others, steps end in between. A gradient is the count of each
    sample: it never counts twice, and whoever is left can bring each to exactly one."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.now_s = TaskPool(), 0.0
        self.sent: list[tuple[str, int]] = []
        self.held: list[tuple[str, int]] = []
        self.gradient: Counter[tuple[Direction, int, int]] = Counter()
        self.sizes: dict[tuple[Direction, int], int] = {}

    @rule(client=NAMES, power=st.floats(0.1, 10))
    def join(self, client: str, power: float) -> None:
        self.pool.join(client, power)

    @rule(client=NAMES)
    def die(self, client: str) -> None:
        self.pool.leave(client)

    @rule(direction=st.sampled_from(Direction), micro=st.integers(0, 3), samples=st.integers(1, 9))
    def add(self, direction: Direction, micro: int, samples: int) -> None:
        made = self.sizes.get((FORWARD, micro))
        if (direction, micro) in self.sizes or (direction is BACKWARD and not self.pool.done(FORWARD, micro)):
            return
        self.sizes[direction, micro] = made if direction is BACKWARD and made is not None else samples
        self.pool.add(direction, micro, self.sizes[direction, micro])

    @rule()
    def reclaim(self) -> None:
        self.pool.reclaim(self.now_s)

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def hold(self, data: st.DataObject) -> None:
        client, number = data.draw(st.sampled_from(self.sent))
        if isinstance(self.pool.hold(client, number, self.now_s), Task):
            self.held.append((client, number))

    @rule(client=NAMES)
    def ask(self, client: str) -> None:
        task = self.pool.ask(client, self.now_s)
        if task is not None:
            self.sent.append((client, task.number))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), thief=st.one_of(st.none(), NAMES), fits=st.booleans())
    def answer(self, data: st.DataObject, thief: str | None, *, fits: bool) -> None:
        client, number = data.draw(st.sampled_from(self.sent))
        self.count(self.pool.answer(thief or client, number, self.now_s, fits=fits))

    def count(self, answered: Task | Refusal) -> None:
        if isinstance(answered, Task):
            for sample in range(answered.begin, answered.end):
                self.gradient[answered.direction, answered.micro, sample] += 1

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.pool.expire(self.now_s)

    @rule()
    def end_step(self) -> None:
        self.pool.begin_step()
        self.gradient.clear()
        self.sizes.clear()

    @invariant()
    def none_counts_twice(self) -> None:
        assert max(self.gradient.values(), default=1) == 1

    @invariant()
    def what_is_done_is_what_counted(self) -> None:
        for (direction, micro), samples in self.sizes.items():
            counted = sum(self.gradient[direction, micro, sample] for sample in range(samples))
            assert self.pool.done(direction, micro) == (counted == samples)

    def teardown(self) -> None:
        """What is held is answered; a client that comes and stays brings all that is left."""
        for client, number in self.held:
            self.count(self.pool.answer(client, number, self.now_s))
        self.now_s += 1e6
        self.pool.expire(self.now_s)
        self.pool.join("last", 1.0)
        while (task := self.pool.ask("last", self.now_s)) is not None:
            self.count(self.pool.answer("last", task.number, self.now_s))
        for (direction, micro), samples in self.sizes.items():
            assert self.pool.done(direction, micro)
            assert [self.gradient[direction, micro, sample] for sample in range(samples)] == [1] * samples


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_an_answer_that_is_held_has_no_deadline_and_counts_once() -> None:
    """1. It is looked at for longer than its deadline: its client is not silent, and its next task has a deadline. 2.
    Another answer to the same task is refused, before and after. 3. Where its client has left, its samples are free."""
    pool = pool_of(a=1.0, b=1.0)
    pool.add(BACKWARD, 0, 8)
    pool.add(BACKWARD, 1, 8)
    first = taken(pool, "a")
    assert pool.hold("a", first.number, 1.0) == first
    assert pool.hold("a", first.number, 1.0) is Refusal.TWICE
    assert pool.hold("b", first.number, 1.0) is Refusal.ANOTHERS
    second = taken(pool, "a", 1.0)
    assert next_deadline_s(pool) == 1.0 + FIRST_S
    assert pool.expire(FIRST_S) == ()
    assert pool.answer("a", first.number, 1.0) == first
    assert pool.hold("a", first.number, 1.0) is Refusal.TWICE
    assert pool.hold("a", second.number, 2.0) == second
    pool.leave("a")
    assert pool.answer("a", second.number, 2.0) is Refusal.STRANGER
    again = taken(pool, "b", 3.0)
    assert (again.begin, again.end) == (second.begin, second.end)


def test_a_task_that_is_overdue_is_computed_by_who_has_nothing_else_to_do_and_the_first_answer_counts() -> None:
    """1. Two clients, of which one is known to take a second for two samples. 2. Before that time nothing is free for
    the other; after it, what the first one has. 3. The first one answers after all, and sooner: the other's is dropped.
    It was never silent."""
    pool = pool_of(a=1.0, b=1.0)
    pool.add(BACKWARD, 0, 4)
    for client, task in [(client, taken(pool, client)) for client in ("a", "b")]:
        pool.answer(client, task.number, 1.0)
    pool.add(BACKWARD, 1, 4)
    slow, quick = taken(pool, "a", 1.0), taken(pool, "b", 1.0)
    assert pool.answer("b", quick.number, 2.0) == quick
    assert pool.ask("b", 2.0) is None
    due_s = pool.next_overdue_s()
    assert due_s is not None
    assert not pool.reclaim(due_s - 0.1)
    assert pool.reclaim(due_s)
    assert not pool.reclaim(due_s)
    twin = taken(pool, "b", due_s)
    assert (twin.begin, twin.end) == (slow.begin, slow.end)
    assert pool.answer("a", slow.number, due_s + 0.1) == slow
    assert pool.answer("b", twin.number, due_s + 0.2) is Refusal.DONE
    assert pool.done(BACKWARD, 1)
    assert (pool.returned, pool.late) == (0, 1)


def test_whose_task_others_had_to_compute_until_the_step_was_over_is_given_none_until_it_speaks() -> None:
    """1. a was killed: b computes its task. 2. The step ends before a's deadline: it is no client any more, and its
    task counts as returned. 3. It was alive after all: its late answer is dropped, and it gets tasks again."""
    pool = pool_of(a=1.0, b=1.0)
    pool.add(BACKWARD, 0, 4)
    for client, task in [(client, taken(pool, client)) for client in ("a", "b")]:
        pool.answer(client, task.number, 1.0)
    pool.add(BACKWARD, 1, 4)
    number = taken(pool, "a", 1.0).number
    pool.answer("b", taken(pool, "b", 1.0).number, 2.0)
    assert pool.reclaim(pool.next_overdue_s() or 0.0)
    pool.answer("b", taken(pool, "b", 5.0).number, 6.0)
    assert pool.done(BACKWARD, 1)
    pool.begin_step()
    assert (pool.clients, pool.returned) == (("b",), 1)
    pool.add(BACKWARD, 0, 4)
    assert pool.ask("a", 6.0) is None
    assert pool.answer("a", number, 6.0) is Refusal.OLD_STEP
    assert taken(pool, "a", 6.0).samples == 2


def test_who_is_always_too_late_for_its_step_is_not_taken_for_one_that_never_answers() -> None:
    """1. A client with a thin link lets each deadline pass, and its answers come when their steps are over. 2. They are
    dropped as late, and it gets tasks again: it is not shut out."""
    pool, now_s = TaskPool(), 0.0
    assert pool.join("thin", 1.0) is None
    for _ in range(3 * MOST_UNANSWERED):
        pool.begin_step()
        pool.add(Direction.BACKWARD, 0, 8)
        task = pool.ask("thin", now_s)
        assert task is not None
        now_s += 1000.0
        assert pool.expire(now_s) == ("thin",)
        pool.begin_step()
        assert pool.answer("thin", task.number, now_s) is Refusal.OLD_STEP
    assert pool.out == {}


def test_a_link_s_time_is_waited_for_beside_the_computing() -> None:
    pool = TaskPool()
    pool.join("thin", 1.0)
    pool.begin_step()
    pool.add(Direction.BACKWARD, 0, 8)
    assert pool.ask("thin", 0.0, travel_s=50.0) is not None
    assert next_deadline_s(pool) == FIRST_S + 50.0
    assert pool.next_overdue_s() == FIRST_S  # then others may compute it, too
