"""Two ranks with unequal batches against one process with the whole batch: models that are awkward to reduce.

Every case trains the same model twice from equal weights, once with the reducer on this rank's part of the batch and
once with plain torch on all of it; after each of some steps parameters must agree."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import nn

from atoll.agent.runtime.agent_link.place import WorkerPlace
from atoll.agent.runtime.agent_link.save_progress import progress
from atoll.agent.runtime.channel.agreement import Agreed, Agreement
from atoll.agent.runtime.channel.proposals import ReducedProposals
from atoll.agent.runtime.checkpoints import restore
from atoll.agent.runtime.checkpoints.disk import files
from atoll.agent.runtime.checkpoints.disk.header import Header, fingerprint
from atoll.agent.runtime.checkpoints.disk.state import pack_state
from atoll.agent.runtime.data.sampler import BatchSlice
from atoll.agent.runtime.session.session import CheckpointSettings, Session
from atoll.agent.runtime.session.throttle import Throttle
from atoll.agent.runtime.step.backward.reduction import ReducedGradients
from atoll.agent.runtime.strategy_interface.capabilities import Norms, Pass, StepEvents
from atoll.agent.runtime.transport import meeting
from atoll.errors import BadInput, PeerLost
from atoll.strategies.declaration import PlanParameters
from atoll.strategies.dense import fusion
from atoll.strategies.dense.settings import Dense
from atoll.strategies.dense.worker import DenseReducer

LOCAL = (5, 2)  # samples of each rank
PLACE = WorkerPlace.from_environment()
GROUP = meeting.join(PLACE, torch.device("cpu"))
assert GROUP is not None


def raise_it(error: PeerLost) -> NoReturn:
    raise error


def reduced(model: nn.Module, open_pass: Callable[[], None] = lambda: None) -> ReducedGradients:
    events = StepEvents(open_pass, lambda: None, lambda: False, lambda: 1.0, raise_it)
    return ReducedGradients(model, DenseReducer(GROUP), events, lambda busy: None, GROUP.gather_rows)


def opened(weight: float, sampled: bool) -> Pass:
    return Pass(batch_slice(weight=weight), PlanParameters(), sampled)


def batch_slice(step: int = 0, epoch: int = 0, start: int = 0, weight: float = 0.5) -> BatchSlice:
    return BatchSlice(step=step, epoch=epoch, start=start, total=7, local=1, weight=weight, share=0.5)


def ended(reducer: ReducedGradients) -> Norms:
    reducer.backward_done()
    return reducer.combined()


def mine(batch: torch.Tensor) -> torch.Tensor:
    begin = sum(LOCAL[: PLACE.rank])
    return batch[begin : begin + LOCAL[PLACE.rank]]


class Tied(nn.Module):
    """Its first and last layers share a weight; one layer is frozen, one never used, one used by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.never = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.wide = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor, with_sometimes: torch.Tensor) -> torch.Tensor:
        y = self.frozen(torch.tanh(self.first(x)))
        if with_sometimes.any():
            y = y + self.sometimes(x) * with_sometimes[:, None]
        return self.last(self.wide(y.double()).float())


def per_sample(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
    chosen = (batch[:, 0] < -5).float()  # marks what only rank 0 has, see `draw`
    return model(batch, chosen).square().mean(dim=1)


def draw(step: int) -> torch.Tensor:
    batch = torch.randn(sum(LOCAL), 6, generator=torch.Generator().manual_seed(step))
    if step % 2:
        batch[0, 0] = -6.0
    return batch


def train(accumulate: int, set_to_none: bool, own_backward: bool) -> None:
    torch.manual_seed(1)
    reference = Tied()
    model = copy.deepcopy(reference)
    model.last.weight = model.first.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (reference, model)]
    weight = LOCAL[PLACE.rank] / sum(LOCAL)
    reducer = reduced(model, lambda: reducer.begin(opened(weight, True)))
    for step in range(6):
        for part in range(accumulate):
            batch = draw(step * accumulate + part)
            per_sample(reference, batch, step).mean().backward()
            if own_backward:
                reducer.begin(opened(weight, part == 0))
            per_sample(model, mine(batch), step).mean().backward()
            norms = ended(reducer)
        if accumulate == 1:
            whole = sum(p.grad.square().sum().item() for p in reference.parameters() if p.grad is not None)
            assert abs(norms.together - whole) <= 1e-4 * whole, (norms, whole)
            assert norms.local > 0
        for (name, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
            if expected.grad is None:
                assert actual.grad is None, name
            else:
                torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=f"{name} in {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        for (name, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5, msg=f"{name} after step {step}")
    reducer.close()


def refuse_sparse() -> None:
    model = nn.EmbeddingBag(10, 3, sparse=True)
    reducer = reduced(model, lambda: reducer.begin(opened(0.5, False)))
    with pytest.raises(BadInput, match=r"sparse=False"):
        model(torch.tensor([[1, 2]])).sum().backward()
    reducer.close()


def nothing_comes_from_a_sample_at_weight_0() -> None:
    """Rank 1's slice is empty; the loss of the one sample it trains for show is NaN (a variance of one, say)."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    reducer = reduced(model)
    for accumulated in (1, 2):
        reducer.begin(opened(1.0 if PLACE.rank == 0 else 0.0, True))
        loss = model(torch.full((1, 3), 2.0)).mean()
        (loss if PLACE.rank == 0 else loss * float("nan")).backward()
        norms = ended(reducer)
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[2.0 * accumulated] * 3]
        assert norms.local == norms.local  # not NaN
    reducer.close()


def tensors_of_every_kind_arrive() -> None:
    """Dtypes that gloo does not know, and tensors with gaps or in another order in memory."""
    rank = float(PLACE.rank)
    sent = [torch.full((4, 3), rank).to(dtype) for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16)]
    sent += [torch.full((4, 3), rank).t(), torch.full((4, 3), rank)[:, 1:], torch.tensor(rank), torch.empty(0)]
    GROUP.broadcast_tensors(sent)
    assert all((tensor == 0).all() for tensor in sent)


def the_same_step_saved_at_two_positions_is_one_after_a_resume() -> None:
    """Two nodes save step 9: rank 0, asked to stop in its validation, at the end of epoch 0; rank 1, which lost a peer
    in the next step, at the start of epoch 1. Both must go on from one of them."""
    settings = CheckpointSettings(directory=Path(tempfile.mkdtemp()), every_steps=0, keep=2)
    session = Session(
        place=PLACE,
        device=torch.device("cpu"),
        job="job",
        run=2,
        seed=0,
        strategy=Dense(),
        checkpoint=settings,
        first=None,
        group=GROUP,
        collective_timeout_s=60,
        link=None,
        throttle=Throttle(1.0),
    )
    assert settings.directory is not None
    tensors, scalars = pack_state({"model": {"w": torch.full((2,), float(PLACE.rank))}})
    header = Header(
        job="job",
        run=1,
        step=9,
        epoch=PLACE.rank,
        consumed=0 if PLACE.rank else 100,
        loader_step=9,
        world_size=2,
        seed=0,
        model=fingerprint({}),
    )
    files.write(settings.directory, header, tensors, scalars)
    newest = restore.find(session, settings.directory, fingerprint({}))
    assert newest is not None
    found = newest.checkpoint
    assert (found.header.epoch, found.header.consumed) == (1, 0)
    assert [tensor.tolist() for tensor in found.tensors.values()] == [[1.0, 1.0]]
    shutil.rmtree(settings.directory)


def many_buckets() -> None:
    """Caps so small that every layer fills a bucket: they must leave in the same order on both ranks."""
    fusion.FIRST_PIECE_BYTES, fusion.PIECE_BYTES = 8, 64  # type: ignore[misc]
    train(accumulate=1, set_to_none=True, own_backward=True)


def agree() -> None:
    """The oldest newest plan, anyone's stop; and ranks that are in different steps are told so."""
    assert GROUP is not None
    agreement = Agreement(ReducedProposals(GROUP), Agreed(0, False), lag=0, deadline_s=60)

    def propose(own: Agreed, **where: int) -> Agreed:
        agreement.propose(batch_slice(**where), own)
        agreement.act()
        return agreement.reached(Agreed(-1, False))

    assert propose(Agreed(3 + PLACE.rank, False), step=4) == Agreed(3, False)
    assert propose(Agreed(9, PLACE.rank == 1), step=5) == Agreed(9, True)
    with pytest.raises(BadInput, match="one rank is in step 6, another rank in step 7"):
        propose(Agreed(9, False), step=6 + PLACE.rank)
    with pytest.raises(BadInput, match="one rank is at sample 12 of epoch 0, another rank at 0 of 1"):
        propose(Agreed(9, False), step=7, epoch=1 - PLACE.rank, start=12 * PLACE.rank)


def numbers_are_added_up() -> None:
    """In the order of ranks, so to the same bits everywhere; infinity is a sum too; unequally many are refused."""
    mine_first = GROUP.sum_numbers([0.1 + PLACE.rank, 1e300, float("inf") if PLACE.rank else 0.0])
    assert mine_first == (0.1 + 1.1, 2e300, float("inf"))
    assert GROUP.sum_numbers([]) == ()
    with pytest.raises(BadInput, match="would add up 1 to 2 numbers"):
        GROUP.sum_numbers([1.0] * (1 + PLACE.rank))


def what_is_large_travels_in_pieces_that_are_told() -> None:
    """A sum over both, what one has to the other, and the same between the two alone: bit for bit, and each byte is
    told once."""
    entries, before = 1_000_003, progress.handed_bytes
    summed = torch.arange(entries, dtype=torch.float32) * (1 + PLACE.rank)
    GROUP.sum_in_place(summed, "adding up")
    assert torch.equal(summed, 3 * torch.arange(entries, dtype=torch.float32))
    whole = np.random.default_rng(1).integers(0, 256, entries, dtype=np.uint8)
    sent = GROUP.distribute(whole.copy() if PLACE.rank == 1 else None, entries, [(1, 0)])
    assert np.array_equal(sent, whole)
    assert np.array_equal(GROUP.hand_over(whole if PLACE.rank == 0 else np.empty(0, np.uint8), 0, 1, entries), whole)
    assert progress.handed_bytes - before == 6 * entries


train(accumulate=1, set_to_none=True, own_backward=True)
train(accumulate=1, set_to_none=False, own_backward=False)
train(accumulate=3, set_to_none=True, own_backward=True)
train(accumulate=2, set_to_none=False, own_backward=True)
refuse_sparse()
nothing_comes_from_a_sample_at_weight_0()
tensors_of_every_kind_arrive()
the_same_step_saved_at_two_positions_is_one_after_a_resume()
many_buckets()
numbers_are_added_up()
what_is_large_travels_in_pieces_that_are_told()
agree()
GROUP.barrier()
assert GROUP.gather_rows([PLACE.rank, 7]) == [[0, 7], [1, 7]]
assert GROUP.broadcast_bytes(b"x" * 1000 if PLACE.rank == 1 else None, 1) == b"x" * 1000
GROUP.close()
print("all cases agree", file=sys.stderr)
