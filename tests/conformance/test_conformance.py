"""What Atoll trains is what plain PyTorch trains: every pair of values of the conformance matrix, in real workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from cases import CHEAP, STRATEGIES, Case, Exact, Learns, Refused, case_of, expected, pairs, short
from deviations import deviation
from pool import Failed, WorkerPool
from supported import PAGE, page
from verdict import failures
from zmq_agent import Start

CASES = short()


@pytest.fixture(scope="module")
def pools(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[WorkerPool]]:
    """Two pools, of which one computes while the other's workers wait for each other."""
    with ExitStack() as stack:
        made = [stack.enter_context(WorkerPool(start, tmp_path_factory.mktemp("pool"))) for _ in range(2)]
        for pool in made:
            pool.ready(2)
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_of_values_trains_as_plain_torch_or_is_refused(pools: Sequence[WorkerPool], strategy: str) -> None:
    """1. Two workers train a small model through the public calls. 2. Plain torch trains it in this process on whole
    batches. 3. The weights agree, or the loss does, or the workers were refused, as the table says."""
    assert failures([case for case in CASES if case.strategy == strategy], *pools) == []


@pytest.mark.timeout(600)
def test_workers_that_are_lost_or_join_and_volunteers_leave_training_as_it_is(start: Start, tmp_path: Path) -> None:
    """1. The last of three workers dies (SIGKILL) in a step. The others make that step again without it, in the same
    processes, or save and start again. 2. Two workers train; a third starts, and all three go on from a step's
    boundary. 3. A volunteer makes passes of each step in the first worker's place. 4. In all cases they end with the
    same weights: those of plain torch, or the loss is."""
    lost = [
        Case("dense", "ema", "adamw", "float32", "accumulated", "lost"),
        Case("dense", "batch-norm", "closure", event="lost"),
        Case("zen/zen", "embedding-sparse", "sgd", event="lost"),
        Case("volunteer", "experts", "sgd-momentum", event="lost"),
        Case("local-steps", event="lost"),
        Case("groups", event="lost"),
        Case("compressed/exact", "buffers", "adamw", event="lost"),
    ]
    joins = [
        Case("dense", "batch-norm", "schedule-by-step", "float16", "accumulated", "join"),
        Case("zen/zen", "ema", "adamw", "autocast", "clip", "join"),
        Case("stale-sparse/exact", "embedding", event="join"),
        Case("dense", "frozen-mid-run", "adamw", event="join"),
        Case("compressed", "frozen-mid-run", event="join"),
        Case("stale-sparse/gradients-exact", "mlp", "sgd-momentum", "bfloat16", event="join"),
        Case("groups/exact", event="join"),
        Case("volunteer", "tied", "changed-mid-run", event="join"),
    ]
    helped = [
        Case("volunteer", "frozen-mid-run", "adamw", "autocast", event="helped"),
        Case("volunteer", "experts", "per-group", "float32", "clip", "helped"),
    ]
    with WorkerPool(start, tmp_path) as pool:
        assert failures([*joins, *helped, *lost], pool) == []


@pytest.mark.timeout(300)
def test_peers_learn_of_a_loss_that_raises_in_a_process_that_lives_on(pools: Sequence[WorkerPool]) -> None:
    """1. The second rank's loss raises. The script catches that and closes its run; its process stays. 2. The first
    rank learns of it at once, not when a collective times out, and is stopped."""
    for strategy in ("dense", "zen/zen", "compressed", "stale-sparse", "volunteer"):
        first, second = pools[0].run(Case(strategy, event="raises"))
        assert first is None
        assert isinstance(second, Failed)
        assert second.kind == "ValueError"


def test_the_cases_cover_every_possible_pair() -> None:
    """Slow values aside, which the long suite covers. A refused case covers what is refused by itself."""
    trained = [case for case in CASES if not isinstance(expected(case), Refused)]
    for pair in pairs(CHEAP):
        by_itself = isinstance(expected(case_of(dict(pair))), Refused)
        among = CASES if by_itself else trained
        assert any(all(getattr(case, name) == value for name, value in pair) for case in among), pair


def test_the_table_expects_more_than_refusals() -> None:
    kinds = [type(expected(case)) for case in CASES]
    assert kinds.count(Exact) > 150
    assert kinds.count(Learns) > 100
    assert kinds.count(Refused) > 20


def test_a_deviation_is_seen() -> None:
    """1. Weights that went another way, 2. a frozen weight that moved, 3. another shape or dtype: all are far off."""
    start, whole = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])
    assert deviation(whole, whole, start) == 0
    assert deviation(torch.tensor([0.9, 0.0, 0.0]), whole, start) == pytest.approx(0.1)
    assert deviation(torch.tensor([0.0, 1.0, 0.0]), whole, start) > 1
    assert deviation(torch.full((3,), 1e-6), start, start) == float("inf")
    assert deviation(whole.double(), whole, start) == float("inf")
    assert deviation(torch.full((3,), float("nan")), whole, start) == float("inf")


def test_the_page_of_what_is_supported_is_the_table_s() -> None:
    assert PAGE.read_text() == page(), "write it anew: .venv/bin/python scripts/conformance --page"
