"""Every interleaving of losses, a join and a change of leader, over the decisions themselves."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest
import world as w

from atoll.controller.jobs.model.observed import ViewStage

Key = tuple[object, ...]
MOST_STATES = 200_000
"""More would not be all of them: the exploration fails, in place of ending early."""


def explored(start: w.World) -> tuple[dict[Key, w.World], dict[Key, set[Key]]]:
    """All states that can be reached, and which follow on each without a fault. Where nobody can do anything, deadlines
    pass."""
    found, waiting, follow = {start.key(): start}, [start], dict[Key, set[Key]]()
    while waiting:
        state = waiting.pop()
        key = state.key()
        assert state.violations == (), (state.violations, state.views, state.processes)
        follow[key] = set()
        if state.over:
            continue
        nexts = {after.key(): after for _, after in w.moves(state)}
        nexts.pop(key, None)
        if not nexts and not w.at_rest(state):
            late = w.controlled(state, late=True)
            assert late.key() != key, f"it waits for ever: {state.views[-3:]}, {state.processes}"
            nexts = {late.key(): late}
        follow[key] = set(nexts)
        for after_key, after in (*nexts.items(), *((after.key(), after) for _, after in w.faults(state))):
            if after_key not in found:
                found[after_key] = after
                waiting.append(after)
        assert len(found) <= MOST_STATES
    return found, follow


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "faults",
    [
        {"kills": 2, "changes": 1, "hurries": 0, "joiners": 0},
        {"kills": 1, "changes": 1, "hurries": 1, "joiners": 0},
        {"kills": 2, "changes": 0, "hurries": 0, "joiners": 1},
        {"kills": 2, "changes": 0, "hurries": 0, "joiners": 2, "least": 3},
        {"kills": 1, "changes": 1, "hurries": 0, "joiners": 1},
        {"kills": 1, "changes": 1, "hurries": 1, "joiners": 1, "least": 3},
    ],
    ids=lambda faults: ", ".join(f"{count} {what}" for what, count in faults.items()),
)
def test_no_two_views_are_in_force_and_nobody_waits_for_ever(faults: dict[str, int]) -> None:
    """1. Three workers train. 2. Workers are killed, another controller leads, deadlines pass early, a worker joins:
    each at any moment. 3. In no order of these are two views in force, or trained in, at once. 4. Nothing goes round in
    a circle (the states that follow on each other without a fault have an order), and who has nothing left to do is in
    a view with all its members past a step, or the run is started again: so nobody waits for ever. 5. It does go on in
    place: alone, and with the joiner."""
    states, follow = explored(w.begin(**faults))
    list(TopologicalSorter(follow).static_order())  # raises CycleError
    rested = [state for key, state in states.items() if not follow[key] and not state.over]
    assert all(w.at_rest(state) for state in rested)
    assert min(len(state.views[-1].ranks) for state in rested) == 3 - faults["kills"] + faults["joiners"]
    assert any(state.views[-1].ranks[:1] != (0,) for state in rested), "also without the first worker"
    assert bool(faults["joiners"]) == any(max(state.views[-1].ranks) > 2 for state in rested)
    failed = any(process.stage is ViewStage.FAILED for state in states.values() for process in state.processes)
    assert failed == (faults["kills"] + faults["hurries"] > 1), "who comes to meet another that is lost or late as well"
