"""Compares what the ranks of a case ended with to plain torch."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch
import trainers
from cases import TRAINERS, Case, Exact, Refused, expected
from deviations import BEHIND, CLOSE, deviation
from pool import CaseHung, Ended, Failed, WorkerPool
from program import SPOILED_STEP, OneRank, Outcome, Plain, loss_of, train

SEEDS: Final = (1, 2, 3)
GENERATOR: Final = threading.Lock()
"""Held while a model is built: all threads draw from the process's one generator."""


def failures(cases: Iterable[Case], *pools: WorkerPool) -> Sequence[str]:
    """Train these cases, as many at once as there are pools. Returns what was wrong with each that does not conform."""
    left, found = deque(cases), []

    def work(pool: WorkerPool) -> None:
        while left:
            with suppress(IndexError):  # another thread took the last one
                try:
                    judge(left.popleft(), pool)
                except (AssertionError, CaseHung) as error:
                    found.append(str(error))

    with ThreadPoolExecutor(len(pools)) as threads:
        for done in [threads.submit(work, pool) for pool in pools]:
            done.result()
    return found


def judge(case: Case, pool: WorkerPool) -> str:
    """Train the case by real workers and by plain torch. Returns what was found; raises AssertionError."""
    ended = pool.run(case)
    want = expected(case)
    if isinstance(want, Refused):
        return _check_refused(case, want, ended)
    for rank, one in enumerate(ended):
        assert isinstance(one, Outcome), f"{case}: rank {rank}: {one.traceback if isinstance(one, Failed) else one}"
    outcomes = [one for one in ended if isinstance(one, Outcome)]
    if isinstance(want, Exact):
        return _check_exact(case, want, outcomes)
    return _check_learns(case, outcomes)


def _check_refused(case: Case, want: Refused, ended: Sequence[Ended]) -> str:
    """Check what each rank raised, and where. A rank that did not refuse has ended because a peer that did is gone."""
    refused = [one for one in ended if isinstance(one, Failed)]
    assert refused, f"{case}: no rank refused"
    for one in refused:
        assert one.kind in {"BadInput", "SettingError"}, f"{case}: {one.traceback}"
        assert any(re.search(text, one.text) for text in want.at_prepare or want.later), f"{case}: {one.text}"
        assert not want.at_prepare or ", in prepare" in one.traceback, f"{case}: not at prepare: {one.traceback}"
    assert not any(isinstance(one, Outcome) for one in ended), f"{case}: a rank trained to the end"
    return "refused"


def reference(case: Case, seed: int = 1) -> Outcome:
    """Train the case without Atoll."""
    with GENERATOR:
        if case.wrapper in TRAINERS:
            return trainers.train(case, trainers.Alone(case, seed), None)
        return train(case, Plain(case, seed))


def _check_exact(case: Case, want: Exact, outcomes: Sequence[Outcome]) -> str:
    whole = reference(case)
    compared = whole.parameters if case.other_passes else whole.end
    worst = max(
        (deviation(one.end[name], whole.end[name], whole.start.get(name.removeprefix("average.module."))), rank, name)
        for rank, one in enumerate(outcomes)
        for name in compared
    )
    assert worst[0] <= want.deviation, f"{case}: {worst[2]} of rank {worst[1]} is off by {worst[0]:.2g} of its way"
    return f"{worst[0]:.1e}"


def _loss(case: Case, state: Mapping[str, torch.Tensor]) -> float:
    with GENERATOR:
        return loss_of(case, dict(state))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_learns(case: Case, outcomes: Sequence[Outcome]) -> str:
    first = outcomes[0].end
    for rank, one in enumerate(outcomes):
        for name in sorted(outcomes[0].parameters):
            if case.sums_updates:
                assert torch.isfinite(one.end[name]).all(), f"{case}: {name} of rank {rank} is not finite"
            assert torch.equal(bits(one.end[name]), bits(first[name])), (
                f"{case}: {name} of rank {rank} differs from rank 0's"
            )
    if case.event == "one-nan" and case.sums_updates:
        for rank, one in enumerate(outcomes):
            later = torch.tensor(one.losses[SPOILED_STEP + 2 :])
            assert torch.isfinite(later).all(), f"{case}: rank {rank} never came back: {one.losses}"
        case = replace(case, event="none")  # plain torch would end with NaN
    whole = reference(case)
    begun, mine = _loss(case, whole.start), _loss(case, first)
    reached = [_loss(case, whole.end)]
    gained = f"learns {(begun - mine) / (begun - reached[0]):.2f}"
    if mine <= reached[0]:
        return gained  # others would only widen the bound
    reached += [_loss(case, reference(case, seed).end) for seed in SEEDS[1:]]
    allowed = BEHIND.get(case.strategy, CLOSE) * (begun - min(reached))
    if case.sums_updates and mine > max(reached) + allowed:
        reached += _reached_alone(case)
    if all(map(math.isfinite, reached)):  # plain torch ends with NaN where one sample is
        assert mine <= max(reached) + allowed, f"{case}: loss {mine:.4g}, plain torch {reached}, from {begun:.4g}"
    return gained


def _reached_alone(case: Case) -> list[float]:
    """Return the losses that plain torch reaches with each rank's samples alone: what each rank's updates make of them
    before they are added up, and all there is left of a rank that did not hear of the others."""
    with GENERATOR:
        return [loss_of(case, train(case, OneRank(case, rank)).end) for rank in range(case.world_size)]
