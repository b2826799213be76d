"""The grouping of ready replicas, model-checked over all interleavings of small pipelines; hypothesis for larger ones.

In the model a worker (stage, pipeline) trains, is ready, is grouped, and trains again once all stages of its pipeline
were: a pipeline's next iteration needs every stage. A window may end at any moment after it began."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.planners.pipelines import group_rounds
from atoll.controller.planners.pipelines.group_rounds import (
    GroupRounds,
    RoundGroup,
    departed,
    passed,
    ready,
    returned,
    window_over,
)
from atoll.controller.planners.pipelines.groups import GroupsInput, plan_groups
from atoll.errors import BadInput

TRAINS, READY, GROUPED = range(3)


@dataclass(frozen=True)
class World:
    """workers: [pipeline][stage]. losses: departures that may still come. gone: pipelines that departed."""

    rounds: GroupRounds
    workers: tuple[tuple[int, ...], ...]
    losses: int = 0
    gone: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Reached:
    """All states, and by number which follow on each."""

    worlds: list[World]
    edges: list[list[int]]


def joins_all(groups: list[frozenset[int]], nodes: frozenset[int]) -> bool:
    """Connectivity by walking, not as the code under test does it."""
    reached = {min(nodes)} if nodes else set()
    while True:
        more = {node for group in groups if group & reached for node in group} | reached
        if more == reached:
            return nodes <= reached
        reached = more


def after(world: World, rounds: GroupRounds, formed: list[RoundGroup]) -> World:
    """Members of what was formed go on; a pipeline whose stages were all grouped begins its next iteration."""
    workers = [list(stages) for stages in world.workers]
    for group in formed:
        for member in group.members:
            assert workers[member][group.stage] == READY, "grouped without having been ready"
            workers[member][group.stage] = GROUPED
    on = tuple(
        (TRAINS,) * len(stages) if all(each == GROUPED for each in stages) else tuple(stages) for stages in workers
    )
    return World(canonical(rounds), on, world.losses, world.gone)


def canonical(rounds: GroupRounds) -> GroupRounds:
    """Without times: that a window is open is all that counts."""
    if rounds.waiting_since_s == 0.0 and all(
        each.since_s == 0.0 and each.window_ends_s in (None, 1.0) for each in rounds.stages
    ):
        return rounds
    stages = tuple(
        replace(each, since_s=0.0, window_ends_s=None if each.window_ends_s is None else 1.0) for each in rounds.stages
    )
    return replace(rounds, stages=stages, waiting_since_s=0.0)


def following(world: World) -> Iterator[tuple[World, list[RoundGroup]]]:
    """Every event that may come next."""
    for pipeline, stages in enumerate(world.workers):
        if pipeline in world.gone:
            if world.losses == 0:  # nobody leaves any more: who left may come back
                rounds = world.rounds
                for stage in range(len(stages)):
                    rounds = returned(rounds, stage, pipeline)
                back = replace(world, gone=world.gone - {pipeline}, rounds=canonical(rounds), losses=-1)
                yield begins_again(back, pipeline), []
            continue
        for stage, phase in enumerate(stages):
            if phase == TRAINS:
                told = tuple(READY if at == stage else each for at, each in enumerate(stages))
                moved = (*world.workers[:pipeline], told, *world.workers[pipeline + 1 :])
                rounds, formed = ready(world.rounds, stage, pipeline, 0.0, 1.0)
                yield after(replace(world, workers=moved), rounds, formed), formed
        if world.losses > 0:
            rounds, formed = world.rounds, []
            for stage in range(len(stages)):
                rounds, more = departed(rounds, stage, pipeline, 0.0)
                formed += more
            left = replace(world, losses=world.losses - 1, gone=world.gone | {pipeline})
            yield after(left, rounds, formed), formed
    for stage, each in enumerate(world.rounds.stages):
        if each.window_ends_s is not None:
            rounds, formed = window_over(world.rounds, stage, 1.0)
            yield after(world, rounds, formed), formed


def begins_again(world: World, pipeline: int) -> World:
    stages = (TRAINS,) * len(world.workers[pipeline])
    return replace(world, workers=(*world.workers[:pipeline], stages, *world.workers[pipeline + 1 :]))


def required(rounds: GroupRounds, stage: int) -> frozenset[int]:
    """Whom the groups of a stage have to connect: live replicas, but for those that just returned to one."""
    return rounds.stages[stage].live - {replica for each in rounds.stages for replica in each.returning}


def check_group(before: GroupRounds, group: RoundGroup, live: frozenset[int]) -> None:
    """Connectivity holds in every group but those that were formed while another stage waited."""
    recent = [*before.stages[group.stage].recent, frozenset(group.members)]
    if group.cause == "not validated":
        assert before.waiting is not None
        assert before.waiting != group.stage
    else:
        assert joins_all(recent, live), (before, group)


@pytest.mark.parametrize(
    ("stages", "replicas", "history", "losses"),
    [
        *((m, n, 2, 0) for m, n in itertools.product((1, 2), (1, 2, 3))),
        *((3, n, 2, 0) for n in (1, 2)),
        *((1, n, p, 0) for n in (2, 3) for p in (1, 3, 4)),
        (2, 2, 3, 0),
        (2, 3, 1, 0),
        *((m, n, 2, 1) for m, n in ((1, 2), (1, 3), (2, 2))),
    ],
)
def test_every_interleaving_answers_every_ready_and_connects_all(
    stages: int, replicas: int, history: int, losses: int
) -> None:
    """1. From every state that can be reached something can still happen: no deadlock, as there was where a replica
    that returned waited for its stage's mean while another stage waited for it. 2. Every group connects all live
    replicas with those before, but for those formed while another stage waits. 3. A ready worker is grouped however
    long the others race: no cycle of states leaves it ready."""
    explore(World(GroupRounds.of(stages, replicas, history), ((TRAINS,) * stages,) * replicas, losses))


@pytest.mark.timeout(300)
def test_every_interleaving_of_three_stages_and_three_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but whether groups connect is left open: each validation passes and fails. So pasts need not be told
    apart, and what holds here holds of every past."""

    def either(world: World) -> Iterator[tuple[World, list[RoundGroup]]]:
        for verdict in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(group_rounds, "connected", lambda *_, verdict=verdict: verdict)
                yield from following(world)

    reached = reachable(World(GroupRounds.of(3, 3, 1), ((TRAINS,) * 3,) * 3), either)
    for stage in range(3):
        check_no_cycle(reached, stage)


def explore(start: World) -> None:
    def checked(world: World) -> Iterator[tuple[World, list[RoundGroup]]]:
        for then, formed in following(world):
            for group in formed:
                check_group(world.rounds, group, required(then.rounds, group.stage))
            yield then, formed

    reached = reachable(start, checked)
    for stage in range(len(start.workers[0])):
        check_no_cycle(reached, stage)


def reachable(start: World, events: Callable[[World], Iterator[tuple[World, list[RoundGroup]]]]) -> Reached:
    """Every state that can be reached, and which it leads to. None is without a way out."""
    reached, numbers = Reached([start], []), {start: 0}
    for world in reached.worlds:  # it grows meanwhile
        follow = []
        for then, _ in events(world):
            number = numbers.setdefault(then, len(numbers))
            if number == len(reached.worlds):
                reached.worlds.append(then)
            follow.append(number)
        assert follow, f"deadlock: {world}"
        reached.edges.append(follow)
    return reached


def check_no_cycle(reached: Reached, stage: int) -> None:
    """Among the states in which this stage's worker of the first pipeline is ready: whatever happens, they are left.
    Pipelines are alike: to each state belongs the one with their numbers exchanged."""
    numbered = enumerate(reached.worlds)
    inside = {n for n, world in numbered if world.workers[0][stage] == READY and 0 not in world.gone}
    done: set[int] = set()
    for first in inside:
        path: list[tuple[int, Iterator[int]]] = [(first, iter(reached.edges[first]))] if first not in done else []
        on_path = {first}
        while path:
            number, rest = path[-1]
            then = next((each for each in rest if each in inside and each not in done), None)
            if then is None:
                done.add(number)
                on_path.discard(number)
                path.pop()
            else:
                assert then not in on_path, f"worker ({stage}, 0) waits for ever: {reached.worlds[then]}"
                on_path.add(then)
                path.append((then, iter(reached.edges[then])))


@st.composite
def clusters(draw: st.DrawFn) -> GroupsInput:
    stages, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    times = st.lists(st.floats(0.05, 3), min_size=replicas, max_size=replicas).map(tuple)
    return GroupsInput(
        replicas=replicas,
        window_s=draw(st.floats(0, 1)),
        history=draw(st.integers(1, 12)),
        average_s=draw(st.floats(0, 0.5)),
        until_s=draw(st.floats(0, 20)),
        iteration_s=tuple(draw(st.lists(times, min_size=stages, max_size=stages))),
    )


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_larger_clusters_keep_the_promise(case: GroupsInput) -> None:
    """Of one stage any `history` groups in a row connect all replicas. Of several, those that were validated do. No
    replica is in a group that it was not ready for, and none waits longer than the slowest takes to become ready."""
    plan = plan_groups(case)
    for stage, times in enumerate(case.iteration_s):
        own = [group for group in plan.groups if group.stage == stage]
        longest_s = max(times) + case.average_s + case.window_s + 1e-6
        ready_s = list(times)
        for group in own:
            for member in group.members:
                assert -1e-9 <= group.formed_s - ready_s[member] <= longest_s
                goes_on_s = group.formed_s + (case.average_s if len(group.members) > 1 else 0)
                ready_s[member] = goes_on_s + times[member]
        for replica, count in enumerate(plan.iterations[stage]):
            assert count == sum(replica in group.members for group in own) + (ready_s[replica] <= case.until_s) * (
                count > sum(replica in group.members for group in own)
            )
        if len(case.iteration_s) == 1:
            for end in range(1, len(own) + 1):
                assert joins_all(
                    [frozenset(group.members) for group in own[max(end - case.history, 0) : end]],
                    frozenset(range(case.replicas)),
                )


def test_equal_replicas_average_all_together_without_waiting_for_the_window() -> None:
    """The last one's signal closes the window: a homogeneous cluster does exactly what an all-reduce does."""
    given_ = GroupsInput(
        replicas=4, window_s=0.5, history=10, average_s=0.25, until_s=10, iteration_s=((1.0,) * 4, (1.0,) * 4)
    )
    plan = plan_groups(given_)
    assert plan.iterations == ((8,) * 4,) * 2
    assert {group.members for group in plan.groups} == {(0, 1, 2, 3)}


def test_a_slow_replica_slows_the_others_only_where_groups_must_connect() -> None:
    """Three times slower than three others. An all-reduce makes 4 * 98 iterations; were each alone, they made 998."""
    given_ = GroupsInput(
        replicas=4, window_s=0.25, history=10, average_s=0.0, until_s=300, iteration_s=((1.0, 1.0, 1.0, 3.05),)
    )
    (counts,) = plan_groups(given_).iterations
    assert sum(counts) > 2 * 4 * 300 / 3.05


def test_who_departed_is_not_waited_for_and_who_returns_goes_with_others_first() -> None:
    """1. Replica 2 departs while 0 and 1 wait for it: they go on. 2. It returns and is ready at once: though its window
    ends nobody is grouped, for it has not the stage's mean. 3. Replica 0 is ready: both go together."""
    rounds = GroupRounds.of(1, 3, 2)
    for replica in (0, 1):
        rounds, formed = ready(rounds, 0, replica, 0.0, 1.0)
        assert formed == []
    rounds, formed = passed(rounds, 1.0)
    assert (formed, rounds.waiting, rounds.due_s) == ([], 0, None)
    rounds, formed = departed(rounds, 0, 2, 2.0)
    assert [(group.members, group.cause, group.waited_s) for group in formed] == [((0, 1), "all ready", 2.0)]
    assert rounds.waiting is None
    with pytest.raises(BadInput, match=r"replica 2 of stage 0 is none of \[0, 1\]"):
        ready(rounds, 0, 2, 2.0, 1.0)
    rounds = returned(rounds, 0, 2)
    rounds, formed = ready(rounds, 0, 2, 3.0, 1.0)
    rounds, more = passed(rounds, 4.0)
    assert formed + more == []
    rounds, formed = ready(rounds, 0, 0, 5.0, 1.0)
    rounds, more = passed(rounds, 6.0)
    assert [(group.members, group.cause) for group in formed + more] == [((0, 2), "window over")]
    assert rounds.stages[0].returning == frozenset()


def test_a_repeated_signal_changes_nothing() -> None:
    rounds, _ = ready(GroupRounds.of(2, 3, 4), 1, 0, 0.0, 1.0)
    assert ready(rounds, 1, 0, 0.5, 1.0) == (rounds, [])
