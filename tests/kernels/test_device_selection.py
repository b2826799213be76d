"""Blocks of gradients and of live weights are chosen on their device: strategies stale-sparse and local-steps on a GPU.

Here the CUDA kernels run on the CPU, with a stand-in for the device's stream.
tests/strategies/stale_sparse/test_on_gpu.py is for a device, and skipped aloud where there is none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from exchange_job import normal, same_bits
from torch import nn
from update_job import UpdateJob

import atoll
from atoll.agent.runtime.session import kernel_notice
from atoll.errors import BadInput
from atoll.kernels import cuda_device
from atoll.kernels.compress import Selection, block_count
from atoll.kernels.cuda_device import CudaQueue, NoCode
from atoll.kernels.exchange_engine import GradientEngine, UpdateEngine
from atoll.strategies.shared_params import exchange
from atoll.strategies.shared_params.device_selection import DeviceDifference, DeviceSelector, SelectionRoom
from atoll.strategies.shared_params.layout import Layer, write_blocks
from atoll.strategies.stale_sparse import gradient_exchange

Rule = Literal["threshold", "topk", "random"]
ENTRIES = 16 * 300 + 5


class HostStream:
    """A CopyStream of the CPU, which is always done."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def mark(self) -> None: ...

    def has_room(self, size: int) -> bool:
        return True

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @contextmanager
    def after(self, mark: None) -> Iterator[None]:
        yield

    def copy(self, source: torch.Tensor, into: torch.Tensor, after: None) -> Callable[[], None]:
        return self.upload(source, into)

    def upload(self, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        into.copy_(source)
        return lambda: None


def room_on(device: str) -> SelectionRoom:
    return SelectionRoom(torch.device(device))


def engine_of(rule: Rule, values: Literal["float32", "float16"]) -> tuple[GradientEngine, torch.Tensor, torch.Tensor]:
    engine = GradientEngine(rank=0, islands=[[0], [1]], values=values, selection=rule, seed=3, first_round=1)
    shared_param, residual = normal(ENTRIES, 1), torch.zeros(ENTRIES)
    assert (
        engine.add_tensor(order=0, rule="sgd", shared_param=shared_param, residual=residual, live=shared_param.clone())
        == 0
    )
    return engine, shared_param, residual


@pytest.mark.parametrize("rule", ["threshold", "topk", "random"])
def test_a_device_chooses_what_the_engine_does(device: str, rule: Rule) -> None:
    """In float32 nothing is rounded away: the same messages and the same residual, bit for bit, round after round, also
    of a rank that contributes nothing and of gradients that are not finite."""
    here, _, residual = engine_of(rule, "float32")
    there, _, beside = engine_of(rule, "float32")
    selector = DeviceSelector(ENTRIES, torch.device(device), rule, room_on(device), error_feedback=True)
    try:
        for number in range(1, 7):
            gradient, weight, k_blocks = normal(ENTRIES, 2, number), 0.25, 10**9 if number == 5 else 31
            if number == 3:
                gradient[100] = float("nan")
            if number == 4:
                weight = 0.0
            here.compress(number, 0, gradient, weight, k_blocks)
            seed = there.selection_seed(number, 0)
            chosen = selector.select(gradient.to(device) if number != 4 else None, weight, k_blocks, seed)
            there.compress_chosen(number, 0, *chosen)
            here.await_compressed(20), there.await_compressed(20)
            assert here.take_outgoing() == there.take_outgoing()
        assert selector.residual is not None
        assert torch.equal(selector.residual.cpu(), residual)
        assert not beside.any()
        ours, theirs = here.take_stats(), there.take_stats()
        assert ours[6:11] == theirs[6:11]  # blocks and bytes
    finally:
        here.close(), there.close()


def test_what_rounding_takes_away_goes_when_its_block_is_next_chosen(device: str) -> None:
    engine, _, residual = engine_of("threshold", "float16")
    selector = DeviceSelector(ENTRIES, torch.device(device), "threshold", room_on(device), error_feedback=True)
    sent, given = torch.zeros(ENTRIES), torch.zeros(ENTRIES)
    try:
        for number in range(1, 5):
            gradient = normal(ENTRIES, 3, number)
            given += gradient
            engine.compress_chosen(number, 0, *selector.select(gradient.to(device), 1.0, 40, 0))
            engine.await_compressed(20)
        for part in engine.recent_parts():
            padded = torch.zeros(block_count(ENTRIES), 16)
            padded[torch.from_numpy(part.index.astype("int64"))] = torch.from_numpy(part.values)
            sent += padded.view(-1)[:ENTRIES]
    finally:
        engine.close()
    assert residual.any()
    assert selector.residual is not None
    assert torch.allclose(sent + residual + selector.residual.cpu(), given, atol=1e-5)


class DeviceJob(UpdateJob):
    """Ranks whose live weights are on a device, where what they send is chosen."""

    def __init__(self, device: str, rule: Rule, islands: Sequence[Sequence[int]], sizes: Sequence[int], **how: Any):
        super().__init__(islands, sizes, by_hand=True, selection=rule, **how)
        room = room_on(device)
        self.device = torch.device(device)
        self.differences = [
            [DeviceDifference(engine, number, one.live.to(device), rule, room) for number, one in enumerate(mine)]
            for engine, mine in zip(self.engines, self.of, strict=True)
        ]
        for differences, mine in zip(self.differences, self.of, strict=True):
            for difference, one in zip(differences, mine, strict=True):
                difference.set(one.shared_param)

    def choose(self, rank: int, tensor: int, k_blocks: int) -> None:
        live = self.of[rank][tensor].live.to(self.device)
        self.differences[rank][tensor].select(self.sync_round[rank], live, self.weights[rank], k_blocks)


@pytest.mark.parametrize("values", ["float32", "float16", "int8"])
@pytest.mark.parametrize("rule", ["threshold", "topk", "random"])
@pytest.mark.parametrize("islands", [[[0], [1], [2]], [[0, 1], [2]]])
def test_a_device_chooses_of_live_weights_what_the_engine_does(
    device: str, rule: Rule, values: Literal["float32", "float16", "int8"], islands: list[list[int]]
) -> None:
    """1. Ranks update, and messages come in any order: own parts are on their way, totals are in the shared parameters
    and not in the live weights. 2. A share of the blocks is sent, then all. 3. Messages, shared parameters, live
    weights and figures are those of ranks whose weights all cross to the CPU, bit for bit. 4. A weight that is not
    finite is counted."""
    sizes, order = [16 * 300 + 5, 16 * 7], random.Random(4)
    here = UpdateJob(islands, sizes, by_hand=True, selection=rule, values=values, seed=3)
    with here, DeviceJob(device, rule, islands, sizes, values=values, seed=3) as there:
        jobs = here, there
        for number in range(8):
            for rank in here.ranks:
                k_blocks = 10**9 if number == 5 else 31
                for job in jobs:
                    if number == 6:
                        job.weigh([1, 2, 3])
                    if number == 7 and rank == 2:
                        job.of[rank][0].live[100] = torch.nan
                    job.walk(rank, k_blocks)
                for _ in range(order.randrange(len(here.wire) + 1)):
                    moved = order.randrange(1000)
                    for job in jobs:
                        job.move_one(moved)
                if order.random() < 0.7:
                    for job in jobs:
                        job.catch_up(rank)
                assert here.wire == there.wire
        for job in jobs:
            job.drain()
            for rank in job.ranks:
                job.catch_up(rank)
        for rank in here.ranks:
            for ours, theirs in zip(here.of[rank], there.of[rank], strict=True):
                assert same_bits(ours.live, theirs.live)
                assert same_bits(ours.shared_param, theirs.shared_param)
            ours, theirs = (job.engines[rank].take_stats() for job in jobs)
            assert ours[6:11] == theirs[6:11]  # blocks and bytes
            assert ours[12:14] == theirs[12:14]  # what is outstanding, and updates
            assert bool(ours[9]) == (rank == 2)


def test_a_reference_is_what_weights_would_be_that_lack_nothing() -> None:
    """1. Nothing changed since the weights were set: nothing crosses. 2. A part on its way is out of the reference. 3.
    Weights that are set again have the shared parameter as reference."""
    with UpdateJob([[0], [1]], [ENTRIES], by_hand=True) as job:
        engine, mine = job.engines[0], job.of[0][0]
        assert len(engine.take_reference(0)[0]) == 0
        job.walk(0, 31)
        index, values = engine.take_reference(0)
        sent = job.parts[0, 0, 0].view(-1)
        reference = mine.shared_param.clone()
        write_blocks(reference, index, values)
        assert 0 < len(index) <= 31
        assert torch.equal(reference, (mine.shared_param - 2 * sent.float()))
        assert list(engine.take_reference(0)[0]) == list(index)  # it may be another the next time
        with pytest.raises(BadInput, match="it must hold the blocks of drift_blocks"):
            engine.compress_chosen_live(1, 0, (index, values, Selection(1, 1, 0)), torch.zeros(16), 0.5)
        job.walk(1, 31)
        job.drain()
        job.catch_up(0)
        engine.set_live(0, None, 0.5, mine.live)
        assert len(engine.take_reference(0)[0]) == 0


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    engine, _, _ = engine_of("threshold", "float32")
    values, counted = torch.ones(2, 16), Selection(2, 2, 0)
    try:
        for index in ([3, 3], [4, 2], [0, 301]):
            with pytest.raises(BadInput, match="index does not ascend, or reaches beyond the last of 301"):
                engine.compress_chosen(1, 0, torch.tensor(index, dtype=torch.int32), values, counted)
        with pytest.raises(BadInput, match="values has 32 entries, not 16"):
            engine.compress_chosen(1, 0, torch.zeros(1, dtype=torch.int32), values, counted)
        engine.compress_chosen(1, 0, torch.tensor([0, 300], dtype=torch.int32), values, counted)
    finally:
        engine.close()


def losses(exchanged: Literal["updates", "gradients"], values: Literal["float32", "int8"]) -> list[float]:
    return trained(atoll.StaleSparse(exchange=exchanged, sparsity=0.5, values=values, staleness=0))


def trained(strategy: atoll.StaleSparse | atoll.LocalSteps) -> list[float]:
    """Return the losses, and what each tensor has of the rank's own and at the end, as a sum."""
    inputs = torch.randn(60, 41, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1] * 2)
    run = atoll.init(seed=5, strategy=strategy)
    try:
        model = nn.Sequential(nn.Linear(41, 40), nn.Tanh(), nn.Linear(40, 1), nn.Linear(1, 1, bias=False))
        unused = nn.Linear(3, 2)
        model.register_module("unused", unused)
        model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = run.prepare(model, optimizer, data, batch_size=10)
        found = []
        for _ in run.epochs(4):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        if (
            isinstance(strategy, atoll.StaleSparse) and strategy.exchange == "gradients"
        ):  # what a checkpoint in memory has of this rank's own, and one on disk
            assert run._training is not None
            durable = run._training._current.driver.durable
            kept = {name: np.zeros(entries, np.float32) for name, entries in durable.rolling().residuals().items()}
            durable.rolling().capture([], kept)
            durable.rolling().read()
            assert durable.rolling().wait(lambda: False)
            assert kept.keys() == durable.residuals().keys()
            assert all(np.array_equal(kept[name], one.numpy()) for name, one in durable.residuals().items())
            found += [float(one.sum()) for one in kept.values()]
        run.synchronize()
        return [*found, *(float(one.detach().double().sum()) for one in model.parameters())]
    finally:
        run.close()


@pytest.mark.timeout(900)  # the first test compiles the kernels
@pytest.mark.parametrize(
    ("exchanged", "values"),
    [("gradients", "float32"), ("gradients", "int8"), ("updates", "float32"), ("updates", "int8")],
)
def test_training_off_the_cpu_is_the_same_bit_for_bit(
    exchanged: Literal["updates", "gradients"],
    values: Literal["float32", "int8"],
    cuda_kernels_on_cpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1. Each step copied every layer's gradient to the CPU: 4 GB of a model of 1 B parameters. 2. Its blocks are
    chosen where it is, and they alone cross; of gradients with values of few bits all is copied. 3. So are those of the
    weights, exchanging updates: with any values."""
    torch.manual_seed(0)
    expected = losses(exchanged, values)
    monkeypatch.setattr(Layer, "on_cpu", property(lambda _layer: False))
    monkeypatch.setattr(exchange, "CudaCopyStream", HostStream)
    # Of the selections alone, which one thread calls: the stand-in for CUDA knows no second.
    monkeypatch.setattr(cuda_device, "queue_of", lambda _arguments: CudaQueue(cuda_kernels_on_cpu, 0))

    def crosses(*_: object) -> None:
        raise AssertionError("all weights of a layer crossed to the CPU")

    monkeypatch.setattr(UpdateEngine, "compress_live", crosses)
    torch.manual_seed(0)
    assert losses(exchanged, values) == expected


def test_passes_at_the_shared_params_take_them_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Each forward pass brought the whole model from pageable memory. 2. It comes through pinned memory, and passes
    see the same values, bit for bit."""
    strategy = atoll.LocalSteps(gradients="shared_params", density=0.5, staleness=0)
    torch.manual_seed(0)
    expected = trained(strategy)
    written: list[int] = []

    def upload(self: HostStream, source: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        written.append(len(into))
        into.copy_(source)
        return lambda: None

    monkeypatch.setattr(HostStream, "upload", upload)
    monkeypatch.setattr(Layer, "on_cpu", property(lambda _layer: False))
    monkeypatch.setattr(exchange, "CudaCopyStream", HostStream)
    torch.manual_seed(0)
    assert trained(strategy) == expected
    assert len(written) >= 24  # a step each, at the least


@pytest.mark.parametrize("exchanged", ["gradients", "updates"])
def test_a_device_without_code_trains_to_the_same_bits_and_says_so(
    exchanged: Literal["updates", "gradients"], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. A V100 and a build of nvcc 13: the first backward pass failed. 2. Whole gradients, or weights, go to the CPU,
    no block is chosen on the device, and run.prepare says why."""
    torch.manual_seed(0)
    expected = losses(exchanged, "float32")
    monkeypatch.setattr(Layer, "on_cpu", property(lambda _layer: False))
    monkeypatch.setattr(exchange, "CudaCopyStream", HostStream)
    for module in (exchange, gradient_exchange, kernel_notice):
        monkeypatch.setattr(module, "why_on_cpu", lambda _device: NoCode("no code for 7.0", "use CUDA 12"))
    monkeypatch.setattr(gradient_exchange, "DeviceSelector", None)
    monkeypatch.setattr(exchange, "DeviceDifference", None)
    monkeypatch.setattr(kernel_notice, "_announced", set())
    torch.manual_seed(0)
    capsys.readouterr()
    assert losses(exchanged, "float32") == expected
    said = capsys.readouterr()
    assert (said.out + said.err).count(
        "on the CPU, on copies of the GPU's tensors, which is slower: no code for 7.0"
    ) == 1
