"""What scripts do, under both exchanges, on some ranks: python stale_cases.py PORTS DIRECTORY."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from several_runs import check_all_ranks_have, opened, shared_params
from torch import nn

import atoll

DIRECTORY = Path(sys.argv[2])
Exchange = Literal["updates", "gradients"]
EXCHANGES: tuple[Exchange, ...] = ("updates", "gradients")
generator = torch.Generator().manual_seed(3)
INPUTS = torch.randn(50, 8, generator=generator)
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True), torch.arange(50))
Model = nn.Module


def network(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), *extra, nn.Tanh(), nn.Linear(64, 33), nn.Tanh(), nn.Linear(33, 1))


def live(model: Model) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def steps(run: atoll.Run, model: Model, optimizer: Any, loader: Any, epochs: int) -> Iterator[torch.Tensor]:
    """Train; yields the ids of each batch after its update."""
    for _ in run.epochs(epochs):
        for x, y, ids in loader:
            run.backward(nn.functional.mse_loss(model(x).float(), y))
            optimizer.step()
            optimizer.zero_grad()
            yield ids


def every_setting_keeps_all_ranks_alike(exchange: Exchange) -> None:
    settings: list[dict[str, Any]] = [
        {"selection": "topk", "values": "bfloat16"},
        {"selection": "random"},
        {"staleness": 0, "values": "float32", "sparsity": 0.99},
    ]
    if exchange == "gradients":
        settings += [{"momentum": "as-is"}, {"error_feedback": False}]
    for one in settings:
        chosen = {"sparsity": 0.8, "digest_every": 1, **one}
        with opened(atoll.StaleSparse(exchange=exchange, **chosen)) as run:
            model = network()
            begun = live(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            model, optimizer, loader = run.prepare(model, optimizer, DATA, batch_size=7)
            for _ in steps(run, model, optimizer, loader, 1):
                pass
            ended = shared_params(run, model)
            check_all_ranks_have(run, ended)
            check_all_ranks_have(run, live(model))
            assert all(torch.equal(ended[name], tensor) for name, tensor in live(model).items())
            assert not any(torch.equal(begun[name], tensor) for name, tensor in ended.items())
            assert run.statistics()["sent_bytes"] > 0


def a_forward_pass_is_never_more_than_a_round_late(exchange: Exchange) -> None:
    """And batch norm, and an evaluation in every epoch."""
    with opened(atoll.StaleSparse(exchange=exchange, sparsity=0.8, digest_every=1)) as run:
        model = network(nn.BatchNorm1d(64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model, optimizer, loader = run.prepare(model, optimizer, DATA, batch_size=10)
        assert run._training is not None
        update: Any = getattr(run._training._current.driver, "update", None)
        done, versions = 0, []

        def look(*_: object) -> None:
            versions.append(
                (min(update._exchange.engine.versions()[layer.number] for layer in update._layers[:2]), done)
            )

        model[0].register_forward_pre_hook(look)  # after the strategy's own
        seen: Counter[int] = Counter()
        for _ in run.epochs(2):
            for x, y, ids in loader:
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                seen.update(ids.tolist())
            run.synchronize()
            check_all_ranks_have(run, live(model))
            model.eval()
            with torch.no_grad():
                model(INPUTS[:3])
            model.train()
        assert all(before - 1 <= version <= before for version, before in versions), versions
        assert int(model[1].num_batches_tracked) == 10
        assert run._session.group is not None
        counts = run._session.group.gather_rows([seen[sample] for sample in range(50)])
        assert [sum(of_ranks) for of_ranks in zip(*counts, strict=True)] == [2] * 50


def half_precision_goes_on_from_the_full_one(exchange: Exchange) -> None:
    """bfloat16 parameters: shared parameters are float32, the same on all ranks, and what a checkpoint keeps."""
    strategy = atoll.StaleSparse(exchange=exchange, sparsity=0.5, digest_every=1)
    kept: dict[str, torch.Tensor] = {}
    for epochs in (1, 2):
        with opened(strategy, checkpoints=DIRECTORY / exchange) as run:
            model = network().bfloat16()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            model, optimizer, loader = run.prepare(model, optimizer, DATA, batch_size=10, collate_fn=in_half)
            begun = shared_params(run, model)
            assert all(torch.equal(begun[name], tensor) for name, tensor in kept.items())
            assert run.step == (5 if kept else 0)
            update: Any = getattr(run._training._current.driver, "update", None) if run._training is not None else None
            if exchange == "updates":  # what bfloat16 cannot hold of the shared parameters is no update of this rank's
                assert not any(residual.any() for residual in update.state.residuals().values())
            for _ in steps(run, model, optimizer, loader, epochs):
                pass
            kept = shared_params(run, model)
            check_all_ranks_have(run, kept)
            for name, shared_param in kept.items():
                assert shared_param.dtype == torch.float32
                assert not torch.equal(shared_param, begun[name]), name
                assert torch.equal(shared_param.bfloat16(), live(model)[name]), name
            assert any(not torch.equal(shared_param, shared_param.bfloat16().float()) for shared_param in kept.values())


def in_half(rows: list[Any]) -> list[torch.Tensor]:
    x, y, ids = torch.utils.data.default_collate(rows)
    return [x.bfloat16(), y, ids]


class Bare(nn.Module):
    """Its embedding's weight is used, the embedding itself never called: no forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(8, 20), nn.Linear(20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(x @ self.table.weight))


def a_weight_without_a_forward_pass_of_its_own_trains_as_in_plain_torch(exchange: Exchange) -> None:
    torch.manual_seed(11)
    model = Bare()
    plain = copy.deepcopy(model)
    with opened(atoll.StaleSparse(exchange=exchange, sparsity=0.0, staleness=0, values="float32")) as run:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, DATA, batch_size=10, shuffle=False)
        for _ in steps(run, model, optimizer, loader, 2):
            pass
        check_all_ranks_have(run, live(model))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x, y in 2 * list(zip(INPUTS.split(10), DATA.tensors[1].split(10), strict=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(live(model), live(plain), rtol=1e-3, atol=2e-6)


if __name__ == "__main__":
    for kind in EXCHANGES:
        every_setting_keeps_all_ranks_alike(kind)
        a_forward_pass_is_never_more_than_a_round_late(kind)
        half_precision_goes_on_from_the_full_one(kind)
        a_weight_without_a_forward_pass_of_its_own_trains_as_in_plain_torch(kind)
    print("all cases hold", file=sys.stderr)
